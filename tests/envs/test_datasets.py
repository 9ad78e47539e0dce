"""Tasks from files, good and bad."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

import rollway as rw
from rollway.errors import DatasetError


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_task_for_each_line(tmp_path: Path) -> None:
    path = write(
        tmp_path / "tasks.jsonl",
        '{"prompt": "1 + 1?", "answer": 2, "level": "easy", "parts": [1, 1]}',
        "",
        '{"id": "last", "prompt": "größer?"}',
    )
    assert list(rw.jsonl(path)) == [
        rw.Task("0", "1 + 1?", 2, {"level": "easy", "parts": [1, 1]}),
        rw.Task("last", "größer?", None, {}),
    ]
    assert list(rw.jsonl(str(path))) == list(rw.jsonl(path))


def test_columns_may_have_other_names(tmp_path: Path) -> None:
    path = write(
        tmp_path / "tasks.jsonl", '{"question": "?", "solution": "!", "answer": "x"}'
    )
    assert list(rw.jsonl(path, prompt="question", answer="solution")) == [
        rw.Task("0", "?", "!", {"answer": "x"})
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: Input data was truncated"),
        ("[1]", "line 2: Expected `object`, got `array`"),
        ("prompt: x", "line 2: JSON is malformed"),
        (
            '{"question": "?", "level": 1}',
            "line 2: no column 'prompt'; the columns are: question, level",
        ),
        ('{"prompt": 3}', "line 2: column 'prompt' holds int, not text"),
        ('{"prompt": null}', "line 2: column 'prompt' holds NoneType, not text"),
        ('{"prompt": "\ud800"}', "line 2: "),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b'{"prompt": "good"}\n' + line.encode(errors="surrogatepass") + b"\n")
    tasks = rw.jsonl(path)
    assert next(tasks).prompt == "good", "tasks before it are given"
    with pytest.raises(DatasetError) as raised:
        next(tasks)
    assert f"{path}, {message}" in str(raised.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        DatasetError, match=r"cannot read tasks from .*/no.jsonl: No such file"
    ):
        list(rw.jsonl(tmp_path / "no.jsonl"))


def test_shuffling_keeps_every_task_and_follows_its_seed(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": str(n)}) for n in range(50)]
    path = write(tmp_path / "tasks.jsonl", *lines)
    order = rw.shuffled(rw.jsonl(path), seed=3)
    assert order == rw.shuffled(rw.jsonl(path), seed=3)
    assert order != rw.shuffled(rw.jsonl(path), seed=4)
    assert sorted(order, key=lambda task: int(task.id)) == list(rw.jsonl(path))


def test_a_task_for_each_row_of_a_parquet_file(tmp_path: Path) -> None:
    path = tmp_path / "tasks.parquet"
    table = pyarrow.table({"prompt": ["a", "b"], "answer": [1, 2], "level": ["x", None]})
    parquet.write_table(table, path)
    assert list(rw.parquet(path)) == [
        rw.Task("0", "a", 1, {"level": "x"}),
        rw.Task("1", "b", 2, {"level": None}),
    ]
    with pytest.raises(DatasetError, match="row 0: no column 'question'"):
        list(rw.parquet(path, prompt="question"))


def test_parquet_without_pyarrow_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(
        DatasetError, match=r"needs pyarrow: pip install 'rollway\[datasets\]'"
    ):
        list(rw.parquet(tmp_path / "tasks.parquet"))


@pytest.mark.skipif(find_spec("datasets") is not None, reason="datasets is installed")
def test_the_hub_without_datasets_says_what_to_install() -> None:
    with pytest.raises(
        DatasetError, match=r"needs the datasets package: pip install 'rollway"
    ):
        list(rw.hub("some/dataset"))
