"""`rollway show`: lists saved rollouts, or shows one with its tokens while its payload exists."""

import sqlite3
import sys
import tomllib
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, cast

from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from ..errors import PayloadError, RunDirError, did_you_mean
from ..payload.reader import SegmentReader
from ..records.payload import PayloadRef
from ..records.rollout import Boundary, Failed
from ..records.text import one_line, visible
from ..rundir.rundir import RunDir
from ..rundir.saved_rollouts import SavedRollout, saved_rollouts, saved_steps

WIDE = 200
"""Columns of a table that goes to a file or another program."""
ROLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}


def show(
    run: Annotated[Path, Argument(help="The run directory: outputs/<name>.")],
    step: Annotated[int | None, Option(help="The step to list; default: the last.")] = None,
    rollout: Annotated[str | None, Option(help="Show this rollout in full: g12.3.")] = None,
) -> None:
    """List the rollouts of a step, or show one rollout: its messages, rewards, timing and tokens.

    Tokens are shown as long as the payload of the rollout exists. Tokens of the environment are grey;
    tokens of the policy go from green (likely) to red (unlikely).
    """
    directory = RunDir(run)
    if not directory.exists:
        raise RunDirError(f"{directory.path} is not a run directory")
    steps = saved_steps(directory)
    if not steps:
        raise RunDirError(
            f"{directory.path} has no saved rollouts (orchestrator.save_rollouts)"
        )
    # ids and texts may hold [brackets]; in a pipe, lines are not wrapped to a terminal's width
    console = Console(markup=False, emoji=False, width=None if sys.stdout.isatty() else WIDE)
    if rollout is not None:
        _show_rollout(directory, rollout, console)
        return
    first, last = steps[0], steps[-1]
    chosen = last if step is None else step
    if chosen not in steps:
        raise RunDirError(
            f"{directory.path} has rollouts of steps {first} to {last}, not of step {chosen}"
        )
    torn: Counter[Path] = Counter()
    rollouts = list(saved_rollouts(directory, chosen, torn))
    console.print(_table(chosen, rollouts))
    console.print(one_line(_summary(rollouts)))
    for path, count in torn.items():
        console.print(f"{count} lines of {path} cannot be read: they may have been cut off")


def _table(step: int, rollouts: list[SavedRollout]) -> Table:
    columns = ("rollout", "env", "task", "reward", "advantage", "turns", "tokens", "end")
    table = Table(*columns, title=f"step {step}: {len(rollouts)} rollouts")
    for saved in rollouts:
        end = saved.stop or ""
        if saved.outcome != "scored":
            end = f"{saved.outcome}: {saved.boundary or saved.reason}"
        if saved.fate != "trained":
            end += f" ({saved.fate})"
        scores = _number(saved.reward), _number(saved.advantage)
        counts = str(saved.num_turns or 0), str(saved.num_tokens or 0)
        cells = saved.rollout, saved.env, saved.task, *scores, *counts, end
        table.add_row(*map(one_line, cells))
    return table


def _summary(rollouts: list[SavedRollout]) -> str:
    """Count the ends of rollouts, and name the commonest failure."""
    outcomes = Counter(saved.outcome for saved in rollouts)
    text = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    failures = [_failure(saved) for saved in rollouts if saved.outcome == "failed"]
    for kind, count in Counter(failed.kind for failed in failures).most_common(1):
        first = next(failed for failed in failures if failed.kind == kind)
        text += f"; commonest failure: {count} × {first.text}"
    return text


def _failure(saved: SavedRollout) -> Failed:
    boundary = cast(Boundary, saved.boundary or "env")
    return Failed(boundary, saved.error or "", where=saved.where or "")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _show_rollout(run: RunDir, rollout_id: str, console: Console) -> None:
    by_id = {saved.rollout: saved for saved in saved_rollouts(run)}
    saved = by_id.get(rollout_id)
    if saved is None:
        hint = did_you_mean(rollout_id, by_id)
        raise RunDirError(f"no saved rollout '{rollout_id}' in {run.path}{hint}")
    place = f"'{saved.env}', task '{saved.task}', step {saved.step}"
    console.print(one_line(f"{saved.rollout} of {place}: {saved.outcome}"))
    if saved.outcome == "scored":
        _show_scores(saved, console)
    for message in saved.read_messages():
        console.print(Text(f"── {one_line(message.role)}", ROLES.get(message.role, "white")))
        console.print(visible(message.content), highlight=False)
    if saved.error or saved.reason:
        reason = saved.traceback or saved.error or saved.reason
        console.print(Text(visible(f"{saved.boundary or ''} {reason}".strip()), "red"))
    for row in _rows(run, rollout_id):
        console.print(row)


def _show_scores(saved: SavedRollout, console: Console) -> None:
    scores = (saved.rewards or {}) | (saved.metrics or {})
    rewards = ", ".join(f"{name} {value:g}" for name, value in scores.items())
    timing = (saved.timing or {}).items()
    times = ", ".join(f"{name.removesuffix('_s')} {value:.2f} s" for name, value in timing)
    advantage = _number(saved.advantage)
    versions = f"{saved.first_version} to {saved.last_version}"
    reward = f"reward {saved.reward:g} ({rewards})"
    console.print(one_line(f"{reward}, advantage {advantage}, {saved.fate}"))
    console.print(one_line(f"versions {versions}; {times}; stop: {saved.stop}"))


def _rows(run: RunDir, rollout_id: str) -> list[Text]:
    """Return the rows of a rollout token by token, or a note if its payload is released."""
    with closing(sqlite3.connect(f"file:{run.ledger}?mode=ro", uri=True)) as db:
        query = "SELECT segment, offset, length FROM rollouts WHERE rollout_id = ? AND segment NOT NULL"
        place = db.execute(query, (rollout_id,)).fetchone()
    if place is None:
        return []
    try:
        columns = SegmentReader(run.payload).open(PayloadRef(*place))
    except PayloadError:
        return [Text("(its tokens are released)", "dim")]
    from ..inference.rendering.tokenizer import Tokenizer

    tokenizer = Tokenizer(tomllib.loads(run.config.read_text())["model"]["path"])
    names = {name.partition(".")[0] for name in columns if name.startswith("row")}
    in_order = sorted(names, key=lambda name: int(name.removeprefix("row")))
    return [_coloured(name, columns, tokenizer) for name in in_order]


def _coloured(row: str, columns: Any, tokenizer: Any) -> Text:
    text = Text(f"── {row}\n", "bold")
    names = ("token_ids", "loss_mask", "logprobs")
    tokens = zip(*(columns[f"{row}.{name}"].tolist() for name in names), strict=True)
    for token_id, is_sampled, logprob in tokens:
        colour = _colour(logprob) if is_sampled else "dim"
        text.append(visible(tokenizer.decode([token_id])), colour)
    return text


def _colour(logprob: float) -> str:
    likely = max(0.0, min(1.0, 1 + logprob / 5))
    return f"rgb({int(255 * (1 - likely))},{int(200 * likely) + 30},60)"
