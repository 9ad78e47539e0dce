"""Tasks from files: JSON lines, Parquet, Hugging Face datasets."""

import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ..errors import UNREADABLE, DatasetError
from ..records.task import Task

INSTALL = "pip install 'rollway[datasets]'"


def jsonl(
    path: str | Path, *, prompt: str = "prompt", answer: str = "answer"
) -> Iterator[Task]:
    """Yield a task for each line of a JSON lines file; `prompt` and `answer` name the columns."""
    with _open(path) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = msgspec.json.decode(line, type=dict[str, Any])
            except (UnicodeError, *UNREADABLE) as error:
                raise DatasetError(f"{path}, line {number}: {error}") from None
            yield as_task(row, number - 1, prompt, answer, f"{path}, line {number}")


def parquet(
    path: str | Path, *, prompt: str = "prompt", answer: str = "answer"
) -> Iterator[Task]:
    """Yield a task for each row of a Parquet file, read piece by piece. Needs pyarrow."""
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise DatasetError(
            f"{path} is a Parquet file, which needs pyarrow: {INSTALL}"
        ) from None
    index = 0
    with _open(path) as file:
        for batch in ParquetFile(file).iter_batches():
            for row in batch.to_pylist():
                yield as_task(row, index, prompt, answer, f"{path}, row {index}")
                index += 1


def hub(
    name: str,
    *,
    split: str = "train",
    prompt: str = "prompt",
    answer: str = "answer",
    **options: Any,
) -> Iterator[Task]:
    """Yield a task for each row of a Hugging Face dataset. Needs the package datasets."""
    try:
        import datasets
    except ImportError:
        raise DatasetError(
            f"dataset '{name}' needs the datasets package: {INSTALL}"
        ) from None
    for index, row in enumerate(datasets.load_dataset(name, split=split, **options)):
        yield as_task(row, index, prompt, answer, f"{name}[{split}], row {index}")


def shuffled(tasks: Iterable[Task], seed: int) -> list[Task]:
    """Return all tasks in an order that the seed decides. `tasks` must be finite."""
    order = list(tasks)
    random.Random(seed).shuffle(order)
    return order


def _open(path: str | Path) -> BinaryIO:
    try:
        return Path(path).open("rb")
    except OSError as error:
        absolute = Path(path).absolute()
        raise DatasetError(
            f"cannot read tasks from {absolute}: {error.strerror or error}"
        ) from None


def as_task(row: Mapping[str, Any], index: int, prompt: str, answer: str, where: str) -> Task:
    """Make a task of a row. Columns other than prompt, answer and id become the task's `info`."""
    if prompt not in row:
        raise DatasetError(
            f"{where}: no column '{prompt}'; the columns are: {', '.join(row)}"
        )
    text = row[prompt]
    if not isinstance(text, str):
        kind = type(text).__name__
        raise DatasetError(f"{where}: column '{prompt}' holds {kind}, not text")
    info = {key: row[key] for key in row if key not in (prompt, answer, "id")}
    return Task(str(row.get("id", index)), text, row.get(answer), info)
