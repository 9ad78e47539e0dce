"""Tasks from files: JSON lines, Parquet, Hugging Face datasets."""

import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ..errors import UNREADABLE, EnvironmentNotFound
from ..records.task import Task


def jsonl(path: str | Path, *, prompt: str = "prompt", answer: str = "answer") -> Iterator[Task]:
    """A task for each line of a JSON lines file; `prompt` and `answer` name the columns."""
    with _opened(path) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = msgspec.json.decode(line, type=dict[str, Any])
            except (UnicodeError, *UNREADABLE) as error:
                raise EnvironmentNotFound(f"{path}, line {number}: {error}") from None
            yield as_task(row, number - 1, prompt, answer, f"{path}, line {number}")


def parquet(path: str | Path, *, prompt: str = "prompt", answer: str = "answer") -> Iterator[Task]:
    """A task for each row of a Parquet file, read piece by piece. Needs pyarrow."""
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise EnvironmentNotFound(
            f"{path} is a Parquet file, which needs pyarrow: pip install 'rollway[datasets]'"
        ) from None
    index = 0
    with _opened(path) as file:
        for batch in ParquetFile(file).iter_batches():
            for row in batch.to_pylist():
                yield as_task(row, index, prompt, answer, f"{path}, row {index}")
                index += 1


def hub(
    name: str, *, split: str = "train", prompt: str = "prompt", answer: str = "answer", **options: Any
) -> Iterator[Task]:
    """A task for each row of a Hugging Face dataset. Needs datasets."""
    try:
        import datasets
    except ImportError:
        raise EnvironmentNotFound(
            f"dataset '{name}' needs the datasets package: pip install 'rollway[datasets]'"
        ) from None
    for index, row in enumerate(datasets.load_dataset(name, split=split, **options)):
        yield as_task(row, index, prompt, answer, f"{name}[{split}], row {index}")


def shuffled(tasks: Iterable[Task], seed: int) -> list[Task]:
    """All of them in an order that the seed decides. For finite tasks."""
    order = list(tasks)
    random.Random(seed).shuffle(order)
    return order


def _opened(path: str | Path) -> BinaryIO:
    try:
        return Path(path).open("rb")
    except OSError as error:
        at = Path(path).absolute()
        raise EnvironmentNotFound(f"cannot read tasks from {at}: {error.strerror or error}") from None


def as_task(row: Mapping[str, Any], index: int, prompt: str, answer: str, where: str) -> Task:
    """Columns besides prompt, answer and id become the task's `info`."""
    if not isinstance(row.get(prompt), str):
        known = ", ".join(row)
        raise EnvironmentNotFound(f"{where}: column '{prompt}' is no text; it has: {known}")
    info = {key: value for key, value in row.items() if key not in (prompt, answer, "id")}
    return Task(str(row.get("id", index)), row[prompt], row.get(answer), info)
