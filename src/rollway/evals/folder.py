"""An evaluation's folder: what was asked, what came of it, and how to go on."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import msgspec

from ..config.plan import env_name
from ..errors import UNREADABLE, RunDirError
from ..payload.reuse import remove_segments
from ..rundir.rundir import lock_folder, write_whole
from .result import EvalResult, ResultKey
from .spec import EvalSpec, differences

_results = msgspec.json.Decoder(EvalResult)


class EvalFolder:
    """`eval.json` (asked), `results.jsonl` (one line a rollout), logs and payload on its way."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.asked = self.path / "eval.json"
        self.results = self.path / "results.jsonl"
        self.logs = self.path / "logs"
        self.payload = self.path / "payload"

    @contextmanager
    def opened(self, asked: EvalSpec, *, resume: bool) -> Iterator[dict[ResultKey, EvalResult]]:
        """Keep others out, and give what is there already; only a resume finds anything."""
        self._check(asked, resume=resume)
        for folder in (self.logs, self.payload):
            folder.mkdir(parents=True, exist_ok=True)
        with lock_folder(self.logs, f"evaluates in {self.path}"):
            self.drop_payload()
            if not resume:
                write_whole(self.asked, msgspec.json.format(msgspec.json.encode(asked)) + b"\n")
            yield read_results(self.results)

    def _check(self, asked: EvalSpec, *, resume: bool) -> None:
        if not resume:
            if self._has_results:
                raise RunDirError(
                    f"{self.path} holds an evaluation already: --resume goes on with it; or give "
                    "another --output"
                )
            is_ours = self.asked.exists() or not self.path.exists()
            if not is_ours and (not self.path.is_dir() or any(self.path.iterdir())):
                raise RunDirError(f"{self.path} exists and is not an evaluation; give another --output")
            return
        if different := differences(self.read_asked(), asked):
            raise RunDirError(
                f"{self.path} was asked for something else: {'; '.join(different)}. Ask for the same, "
                "or start anew without --resume"
            )

    @property
    def _has_results(self) -> bool:
        """One that never came to a result may be started over."""
        return self.asked.exists() and self.results.exists() and self.results.stat().st_size > 0

    def read_asked(self) -> EvalSpec:
        try:
            return msgspec.json.decode(self.asked.read_bytes(), type=EvalSpec)
        except FileNotFoundError:
            raise RunDirError(f"no evaluation at {self.path} to resume") from None
        except (OSError, *UNREADABLE) as error:
            raise RunDirError(f"cannot read {self.asked}: {error}") from None

    def drop_payload(self) -> None:
        remove_segments(self.payload)


def read_results(path: Path) -> dict[ResultKey, EvalResult]:
    """The rollouts of a file, the last line of each. A torn last line, left by a crash, is cut off."""
    if not path.exists():
        return {}
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)
    found: dict[ResultKey, EvalResult] = {}
    for number, line in enumerate(data[:whole].splitlines(), 1):
        try:
            result = _results.decode(line)
        except UNREADABLE as error:
            raise RunDirError(f"{path}:{number} is not a result: {error}") from None
        found[result.key] = result
    return found


def root_of(asked: EvalSpec, outputs: Path) -> Path:
    """Where evaluations of one environment and model lie."""
    model = re.sub(r"[^A-Za-z0-9._-]+", "-", asked.model).strip("-.") or "model"
    return outputs / "eval" / env_name(asked.env) / model


def new_folder(root: Path, now: datetime) -> EvalFolder:
    """A folder that does not exist yet, called by the time."""
    name = now.strftime("%Y%m%d-%H%M%S")
    taken = {one.name for one in root.glob(f"{name}*")}
    number = next(n for n in range(1, len(taken) + 2) if _numbered(name, n) not in taken)
    return EvalFolder(root / _numbered(name, number))


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}-{number}"


def latest_folder(root: Path, asked: EvalSpec) -> EvalFolder:
    """The newest evaluation that was asked for the same."""
    known = sorted(root.glob("*/eval.json"), key=lambda one: one.stat().st_mtime, reverse=True)
    if not known:
        raise RunDirError(f"no evaluation below {root} to resume; --output names one elsewhere")
    folders = [EvalFolder(one.parent) for one in known]
    for folder in folders:
        if not differences(folder.read_asked(), asked):
            return folder
    newest = "; ".join(differences(folders[0].read_asked(), asked))
    raise RunDirError(f"no evaluation below {root} was asked for this; in {folders[0].path}: {newest}")
