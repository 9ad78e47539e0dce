"""`rollway show`: saved rollouts, and the tokens of one as long as they are there."""

import sqlite3
import tomllib
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import PayloadError, RunDirError, did_you_mean
from ..payload.reader import SegmentReader
from ..records.payload import PayloadRef
from ..rundir.rundir import RunDir
from ..rundir.saved_rollouts import SavedRollout, saved_rollouts, saved_steps

ROLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}


def show(
    run: Annotated[Path, typer.Argument(help="Run directory: outputs/<name>.")],
    step: Annotated[
        int | None, typer.Option("--step", help="Of this step; the last by default.")
    ] = None,
    rollout: Annotated[str | None, typer.Option("--rollout", help="One rollout, whole: g12.3.")] = None,
) -> None:
    """List a step's rollouts, or show one: what was said, what it was worth, how long it took.

    Tokens are shown while their payload is there: grey what the environment wrote, green to red what the
    policy drew, by its probability.
    """
    directory = RunDir(run)
    if not directory.exists:
        raise RunDirError(f"{directory.path} is not a run directory")
    steps = saved_steps(directory)
    if not steps:
        raise RunDirError(f"{directory.path} has no saved rollouts (orchestrator.save_rollouts)")
    console = Console()
    if rollout is not None:
        _show_one(directory, rollout, console)
        return
    wanted = step if step is not None else steps[-1]
    if wanted not in steps:
        raise RunDirError(
            f"{directory.path} has rollouts of steps {steps[0]} to {steps[-1]}, not {wanted}"
        )
    console.print(_table(wanted, list(saved_rollouts(directory, wanted))))


def _table(step: int, rollouts: list[SavedRollout]) -> Table:
    table = Table("rollout", "env", "task", "reward", "advantage", "turns", "tokens", "end",
                  title=f"step {step}: {len(rollouts)} rollouts")  # fmt: skip
    for one in rollouts:
        end = one.stop if one.outcome == "scored" else f"{one.outcome}: {one.boundary or one.reason}"
        note = "" if one.fate == "trained" else f" ({one.fate})"
        table.add_row(one.rollout, one.env, one.task, _number(one.reward), _number(one.advantage),
                      str(one.num_turns or 0), str(one.num_tokens or 0), f"{end}{note}")  # fmt: skip
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _show_one(run: RunDir, id: str, console: Console) -> None:
    everyone = {one.rollout: one for one in saved_rollouts(run)}
    one = everyone.get(id)
    if one is None:
        raise RunDirError(f"no saved rollout '{id}' in {run.path}{did_you_mean(id, everyone)}")
    console.print(f"{one.rollout} of '{one.env}', task '{one.task}', step {one.step}: {one.outcome}")
    if one.outcome == "scored":
        rewards = ", ".join(
            f"{name} {value:g}" for name, value in {**(one.rewards or {}), **(one.metrics or {})}.items()
        )
        times = ", ".join(
            f"{name.removesuffix('_s')} {value:.2f} s" for name, value in (one.timing or {}).items()
        )
        console.print(
            f"reward {one.reward:g} ({rewards}), advantage {_number(one.advantage)}, {one.fate}"
        )
        console.print(f"versions {one.first_version} to {one.last_version}; {times}; stop: {one.stop}")
    for message in one.read_messages():
        console.print(Text(f"── {message.role}", ROLES.get(message.role, "white")))
        console.print(message.content, markup=False, highlight=False)
    if one.error or one.reason:
        said = one.traceback or one.error or one.reason
        console.print(Text(f"{one.boundary or ''} {said}".strip(), "red"))
    for row in _rows(run, id):
        console.print(row)


def _rows(run: RunDir, id: str) -> list[Text]:
    """The rollout's rows token by token; none once its payload is released."""
    with closing(sqlite3.connect(f"file:{run.ledger}?mode=ro", uri=True)) as db:
        query = "SELECT segment, offset, length FROM rollouts WHERE rollout_id = ? AND segment NOT NULL"
        found = db.execute(query, (id,)).fetchone()
    if found is None:
        return []
    try:
        columns = SegmentReader(run.payload).open(PayloadRef(*found))
    except PayloadError:
        return [Text("(its tokens are released)", "dim")]
    tokenizer = _tokenizer(run)
    names = sorted({name.partition(".")[0] for name in columns if name.startswith("row")})
    return [_coloured(name, columns, tokenizer) for name in names]


def _tokenizer(run: RunDir) -> Any:
    from ..inference.rendering.tokenizer import Tokenizer

    return Tokenizer(tomllib.loads(run.config.read_text())["model"]["path"])


def _coloured(row: str, columns: Any, tokenizer: Any) -> Text:
    text = Text(f"── {row}\n", "bold")
    ids, mask = columns[f"{row}.token_ids"].tolist(), columns[f"{row}.loss_mask"].tolist()
    for id, is_drawn, logprob in zip(ids, mask, columns[f"{row}.logprobs"].tolist(), strict=True):
        text.append(tokenizer.decode([id]), _colour(logprob) if is_drawn else "dim")
    return text


def _colour(logprob: float) -> str:
    """Green where it was likely, red where it was not."""
    likely = max(0.0, min(1.0, 1 + logprob / 5))
    return f"rgb({int(255 * (1 - likely))},{int(200 * likely) + 30},60)"
