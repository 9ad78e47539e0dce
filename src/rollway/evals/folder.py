"""The folder of an evaluation: its specification, its results, and how it is resumed."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import msgspec

from ..config.credentials import hide_all_credentials
from ..config.plan import env_name
from ..errors import UNREADABLE, RunDirError
from ..loop.processes.leftovers import mark_folder
from ..payload.reuse import remove_segments
from ..rundir.rundir import lock_folder, write_whole
from .result import RolloutResult, RolloutResults
from .spec import EvalSpec, differences

_results = msgspec.json.Decoder(RolloutResult)


class EvalFolder:
    """Holds `eval.json` (the specification), `results.jsonl` (one line per rollout), logs, payload."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.spec_file = self.path / "eval.json"
        self.results = self.path / "results.jsonl"
        self.logs = self.path / "logs"
        self.payload = self.path / "payload"

    @contextmanager
    def opened(self, spec: EvalSpec, *, resume: bool) -> Iterator[RolloutResults]:
        """Lock the folder and yield the results of a resumed evaluation; drop the payload at the end."""
        self.check(spec, resume=resume)
        for folder in (self.logs, self.payload):
            folder.mkdir(parents=True, exist_ok=True)
        with lock_folder(self.path, f"evaluates in {self.path}"):
            mark_folder(self.path)
            remove_segments(self.payload)
            if not resume:
                shown = hide_all_credentials(msgspec.to_builtins(spec))
                text = msgspec.json.format(msgspec.json.encode(shown))
                write_whole(self.spec_file, text + b"\n")
            try:
                yield read_results(self.results)
            finally:
                remove_segments(self.payload)

    def check(self, spec: EvalSpec, *, resume: bool) -> None:
        """Refuse a folder that another evaluation has, or that has none to resume."""
        if resume:
            self._check_same(spec)
        else:
            self._check_unused()

    def _check_same(self, spec: EvalSpec) -> None:
        if changes := differences(self.read_spec(), spec):
            raise RunDirError(
                f"{self.path} holds another evaluation: {'; '.join(changes)}. Use the same options, or "
                "start again without --resume"
            )

    def _check_unused(self) -> None:
        """Refuse a folder that holds results or foreign files; without results it may start over."""
        path, results = self.path, self.results
        if self.spec_file.exists():
            if results.exists() and results.stat().st_size > 0:
                raise RunDirError(
                    f"{path} holds an evaluation already: continue it with --resume, or give another "
                    "--output"
                )
        elif path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise RunDirError(
                f"{path} exists and is not an evaluation; give another --output"
            )

    def read_spec(self) -> EvalSpec:
        try:
            return msgspec.json.decode(self.spec_file.read_bytes(), type=EvalSpec)
        except FileNotFoundError:
            raise RunDirError(f"no evaluation at {self.path} to resume") from None
        except (OSError, *UNREADABLE) as error:
            raise RunDirError(f"cannot read {self.spec_file}: {error}") from None


def read_results(path: Path) -> RolloutResults:
    """Read the last result of each rollout. An incomplete last line (after a crash) is cut off."""
    if not path.exists():
        return {}
    *lines, incomplete = path.read_bytes().split(b"\n")
    if incomplete:
        os.truncate(path, path.stat().st_size - len(incomplete))
    results: RolloutResults = {}
    for number, line in enumerate(lines, 1):
        try:
            result = _results.decode(line)
        except UNREADABLE as error:
            raise RunDirError(f"{path}:{number} is not a result: {error}") from None
        results[result.key] = result
    return results


def root_of(spec: EvalSpec, outputs: Path) -> Path:
    model = re.sub(r"[^A-Za-z0-9._-]+", "-", spec.model).strip("-.") or "model"
    return outputs / "eval" / env_name(spec.env) / model


def new_folder(root: Path, now: datetime) -> EvalFolder:
    """Return a folder that does not exist yet, named by the time."""
    name, number = now.strftime("%Y%m%d-%H%M%S"), 1
    path = root / name
    while path.exists():
        number += 1
        path = root / f"{name}-{number}"
    return EvalFolder(path)


def latest_folder(root: Path, spec: EvalSpec) -> EvalFolder:
    files = sorted(
        root.glob("*/eval.json"), key=lambda path: path.stat().st_mtime, reverse=True
    )
    if not files:
        raise RunDirError(
            f"no evaluation in {root} to resume; if it is elsewhere, give its --output"
        )
    folders = [EvalFolder(path.parent) for path in files]
    for folder in folders:
        if not differences(folder.read_spec(), spec):
            return folder
    newest = folders[0]
    changes = "; ".join(differences(newest.read_spec(), spec))
    raise RunDirError(
        f"no evaluation in {root} has these options; the newest, {newest.path}: {changes}"
    )
