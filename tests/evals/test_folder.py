"""An evaluation's folder: what is read back, what is refused, what is found again."""

import os
from datetime import datetime
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollway.errors import RunDirError
from rollway.evals.driver import orders
from rollway.evals.folder import EvalFolder, latest_folder, new_folder, read_results, root_of
from rollway.evals.recorder import open_recorder
from rollway.evals.result import EvalResult, ResultError, ResultKey
from rollway.evals.spec import EvalSpec, differences
from rollway.records.turn import Sampling

ASKED = EvalSpec(
    env="envs/my env.py", args={"k": 1}, split="eval", num_tasks=2, num_rollouts=2, model="Org/Model-8B",
    base_url="http://localhost:8000/v1", speaks="messages", tokenizer="", renderer="auto", template={},
    sampling=Sampling(64, 0.5), seed=0,
)  # fmt: skip
NOW = datetime(2026, 1, 2, 3, 4, 5)


def asked(**changes: object) -> EvalSpec:
    return msgspec.structs.replace(ASKED, **changes)


def result(position: int, rollout: int, *, ok: bool = True) -> EvalResult:
    known = EvalResult(position=position, task=f"t{position}", rollout=rollout, reward=1.0)
    failed = msgspec.structs.replace(known, reward=None, error=ResultError("engine", "no"))
    return known if ok else failed


def test_what_differs_is_named_as_it_is_asked_for() -> None:
    assert differences(ASKED, asked(base_url="http://elsewhere")) == [], "a model may move"
    now = asked(num_tasks=3, sampling=Sampling(64, 0.7), args={})
    assert differences(ASKED, now) == [
        "args was {'k': 1}, is {}", "-n was 2, is 3", "temperature was 0.5, is 0.7",
    ]  # fmt: skip


def test_folders_are_called_by_env_model_and_time(tmp_path: Path) -> None:
    root = root_of(ASKED, tmp_path)
    assert root == tmp_path / "eval" / "my-env" / "Org-Model-8B"
    names = []
    for _ in range(3):
        folder = new_folder(root, NOW)
        with folder.opened(ASKED, resume=False) as known:
            assert known == {}
        names.append(folder.path.name)
    assert names == ["20260102-030405", "20260102-030405-2", "20260102-030405-3"]


def test_the_latest_that_fits_is_found(tmp_path: Path) -> None:
    root = root_of(ASKED, tmp_path)
    with pytest.raises(RunDirError, match=r"no evaluation below .* to resume"):
        latest_folder(root, ASKED)
    for age_s, tasks in ((30, 2), (20, 2), (10, 5)):
        folder = new_folder(root, NOW)
        with folder.opened(asked(num_tasks=tasks), resume=False):
            os.utime(folder.asked, (1e9 - age_s, 1e9 - age_s))
    assert latest_folder(root, ASKED).path.name == "20260102-030405-2"
    with pytest.raises(RunDirError, match=r"-n was 5, is 9"):
        latest_folder(root, asked(num_tasks=9))


def test_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(RunDirError, match="is not an evaluation"), EvalFolder(tmp_path).opened(
        ASKED, resume=False
    ):  # fmt: skip
        pass
    with pytest.raises(RunDirError, match=r"no evaluation at .* to resume"), EvalFolder(tmp_path).opened(
        ASKED, resume=True
    ):  # fmt: skip
        pass
    assert [one.name for one in tmp_path.iterdir()] == ["mine.txt"]


def test_what_never_came_to_a_result_may_be_started_over(tmp_path: Path) -> None:
    folder = EvalFolder(tmp_path / "one")
    for wanted in (asked(env="typo"), ASKED):
        with folder.opened(wanted, resume=False):
            assert folder.read_asked() == wanted
    folder.results.write_bytes(msgspec.json.encode(result(0, 0)) + b"\n")
    with (
        pytest.raises(RunDirError, match="holds an evaluation already"),
        folder.opened(ASKED, resume=False),
    ):
        pass
    with folder.opened(ASKED, resume=True) as known:
        assert list(known) == [(0, 0)]


def test_one_process_at_a_time(tmp_path: Path) -> None:
    folder = EvalFolder(tmp_path / "one")
    with (
        folder.opened(ASKED, resume=False),
        pytest.raises(RunDirError, match="another process evaluates"),
        EvalFolder(folder.path).opened(ASKED, resume=True),
    ):
        pass


@given(cut=st.integers(0, 400))
def test_a_torn_end_is_cut_and_all_before_it_kept(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("torn") / "results.jsonl"
    encoded = [msgspec.json.encode(result(n, 0)) + b"\n" for n in range(3)]
    data = b"".join(encoded)[: len(b"".join(encoded)) - cut]
    path.write_bytes(data)
    whole = data.count(b"\n")
    assert set(read_results(path)) == {(n, 0) for n in range(whole)}
    assert path.read_bytes() == b"".join(encoded[:whole])


def test_a_broken_line_elsewhere_is_named_and_the_last_of_a_rollout_counts(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    twice = [result(0, 0, ok=False), result(0, 0)]
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in twice))
    assert read_results(path) == {(0, 0): result(0, 0)}
    path.write_bytes(b"oops\n" + msgspec.json.encode(twice[0]) + b"\n")
    with pytest.raises(RunDirError, match=r"results.jsonl:1 is not a result"):
        read_results(path)


def test_what_is_missing_runs_and_groups_run_whole() -> None:
    known: dict[ResultKey, EvalResult] = {(0, 0): result(0, 0), (0, 1): result(0, 1, ok=False)}
    assert orders(0, 3, known, whole_groups=False) == [(1,), (2,)]
    assert orders(0, 3, known, whole_groups=True) == [(0, 1, 2)]
    assert orders(0, 1, known, whole_groups=True) == []
    assert orders(1, 2, known, whole_groups=False) == [(0,), (1,)]


@pytest.mark.anyio
async def test_a_full_disk_ends_it_with_one_line(tmp_path: Path) -> None:
    folder = EvalFolder(tmp_path / "full")
    with folder.opened(ASKED, resume=False):
        folder.results.symlink_to("/dev/full")
        with pytest.raises(RunDirError, match=r"cannot write to .*No space left"):
            async with open_recorder(folder) as recorder:
                await recorder.add(result(0, 0, ok=False), None)
