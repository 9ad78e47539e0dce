"""What an evaluation was asked for: the part of it that decides what its results mean."""

from typing import Any, Literal

import msgspec
from msgspec import Struct

from ..records.task import Split
from ..records.turn import Sampling

OPTIONS = {
    "num_tasks": "-n", "num_rollouts": "-r", "model": "-m", "base_url": "--base-url",
    "speaks": "--tokens", "max_tokens": "--max-tokens", "top_p": "--top-p",
}  # fmt: skip
MAY_DIFFER = ("base_url",)
"""The same model may have moved."""


class EvalSpec(Struct, frozen=True, kw_only=True):
    """One evaluation, as `eval.json` holds it. The key is not part of it."""

    env: str
    args: dict[str, Any]
    split: Split
    num_tasks: int
    num_rollouts: int
    """Of each task."""
    model: str
    base_url: str
    """Empty for the embedded engine."""
    speaks: Literal["tokens", "messages"]
    tokenizer: str
    renderer: str
    template: dict[str, Any]
    sampling: Sampling
    seed: int

    @property
    def total(self) -> int:
        return self.num_tasks * self.num_rollouts


def differences(was: EvalSpec, now: EvalSpec) -> list[str]:
    """What makes the results of one useless for the other, in the words of the command line."""
    old, new = _flat(was), _flat(now)
    return [
        f"{OPTIONS.get(name, name)} was {old[name]!r}, is {new[name]!r}"
        for name in old
        if name not in MAY_DIFFER and old[name] != new[name]
    ]


def _flat(asked: EvalSpec) -> dict[str, Any]:
    tree: dict[str, Any] = msgspec.to_builtins(asked)
    sampling: dict[str, Any] = tree.pop("sampling")
    return tree | sampling
