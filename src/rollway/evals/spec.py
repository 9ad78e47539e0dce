"""The specification of an evaluation, which decides what its results mean, and how it is run."""

from typing import Any

import msgspec
from msgspec import Struct

from ..config.credentials import hide_all_credentials
from ..config.specs import Speaks, WatchSpec
from ..records.task import Split
from ..records.turn import Sampling

OPTIONS = {
    "env": "the environment",
    "num_tasks": "-n",
    "num_rollouts": "-r",
    "model": "-m",
    "speaks": "--tokens",
}
"""The options of fields; a field `some_name` that is not listed is the option `--some-name`."""
MAY_DIFFER = ("engine_url",)
"""Fields that a resume may change: the same model may have moved to another address."""


class EvalSpec(Struct, frozen=True, kw_only=True):
    """An evaluation as `eval.json` holds it. The engine's key is not part of it."""

    env: str
    args: dict[str, Any]
    split: Split
    num_tasks: int
    num_rollouts: int
    model: str
    engine_url: str
    """The address of the endpoint; empty for the embedded engine."""
    speaks: Speaks
    tokenizer: str
    renderer: str
    template: dict[str, Any]
    sampling: Sampling
    seed: int

    @property
    def total(self) -> int:
        return self.num_tasks * self.num_rollouts


class EvalRuntime(Struct, frozen=True):
    """The settings that decide how fast an evaluation runs, and not what its results mean."""

    concurrency: int
    workers: int
    rollout_deadline_s: float
    max_context: int
    key_var: str
    trust_remote_code: bool = False
    watch: WatchSpec = WatchSpec()


def differences(old: EvalSpec, new: EvalSpec) -> list[str]:
    """Name the options by which two evaluations differ so that their results cannot be mixed."""
    changes, new_values = [], _flatten(new)
    for name, value in _flatten(old).items():
        now = new_values[name]
        if name not in MAY_DIFFER and value != now:
            option = OPTIONS.get(name) or "--" + name.replace("_", "-")
            changes.append(f"{option} was {value!r}, is {now!r}")
    return changes


def _flatten(spec: EvalSpec) -> dict[str, Any]:
    tree: dict[str, Any] = hide_all_credentials(msgspec.to_builtins(spec))
    sampling: dict[str, Any] = tree.pop("sampling")
    return tree | sampling
