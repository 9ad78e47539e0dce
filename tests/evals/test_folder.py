"""The folder of an evaluation: what is read back, what is refused, and which one is resumed."""

import os
from datetime import datetime
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollway.errors import RunDirError
from rollway.evals.driver import missing_rollouts
from rollway.evals.folder import EvalFolder, latest_folder, new_folder, read_results, root_of
from rollway.evals.recorder import open_recorder
from rollway.evals.result import EvalFailure, ResultKey, RolloutResult
from rollway.evals.spec import EvalSpec, differences
from rollway.records.turn import Sampling

SPEC = EvalSpec(
    env="envs/my env.py", args={"k": 1}, split="eval", num_tasks=2, num_rollouts=2, model="Org/Model-8B",
    engine_url="http://localhost:8000/v1", speaks="messages", tokenizer="", renderer="auto", template={},
    sampling=Sampling(64, 0.5), seed=0,
)  # fmt: skip
NOW = datetime(2026, 1, 2, 3, 4, 5)


def changed(**changes: object) -> EvalSpec:
    return msgspec.structs.replace(SPEC, **changes)


def result(position: int, rollout: int, *, ok: bool = True) -> RolloutResult:
    scored = RolloutResult(
        position=position, task=f"t{position}", rollout=rollout, reward=1.0
    )
    failed = msgspec.structs.replace(scored, reward=None, error=EvalFailure("engine", "no"))
    return scored if ok else failed


def test_differences_are_named_by_their_options() -> None:
    assert differences(SPEC, changed(engine_url="http://elsewhere")) == [], "a model may move"
    now = changed(num_tasks=3, sampling=Sampling(64, 0.7), args={})
    assert differences(SPEC, now) == [
        "--args was {'k': 1}, is {}", "-n was 2, is 3", "--temperature was 0.5, is 0.7",
    ]  # fmt: skip


def test_passwords_in_arguments_are_neither_written_nor_compared(tmp_path: Path) -> None:
    spec = changed(args={"judge": "http://me:secret@host"})
    folder = EvalFolder(tmp_path / "eval")
    with folder.opened(spec, resume=False):
        pass
    assert folder.read_spec().args == {"judge": "http://***@host"}
    folder.check(spec, resume=True)
    (told,) = differences(spec, changed(args={}))
    assert told == "--args was {'judge': 'http://***@host'}, is {}"


def test_folders_are_named_by_environment_model_and_time(tmp_path: Path) -> None:
    root = root_of(SPEC, tmp_path)
    assert root == tmp_path / "eval" / "my-env" / "Org-Model-8B"
    names = []
    for _ in range(3):
        folder = new_folder(root, NOW)
        with folder.opened(SPEC, resume=False) as previous:
            assert previous == {}
        names.append(folder.path.name)
    assert names == ["20260102-030405", "20260102-030405-2", "20260102-030405-3"]


def test_the_newest_evaluation_with_the_same_options_is_resumed(tmp_path: Path) -> None:
    root = root_of(SPEC, tmp_path)
    with pytest.raises(RunDirError, match=r"no evaluation in .* to resume"):
        latest_folder(root, SPEC)
    for age_s, tasks in ((30, 2), (20, 2), (10, 5)):
        folder = new_folder(root, NOW)
        with folder.opened(changed(num_tasks=tasks), resume=False):
            os.utime(folder.spec_file, (1e9 - age_s, 1e9 - age_s))
    assert latest_folder(root, SPEC).path.name == "20260102-030405-2"
    with pytest.raises(RunDirError, match=r"-n was 5, is 9"):
        latest_folder(root, changed(num_tasks=9))


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(RunDirError, match="is not an evaluation"), EvalFolder(tmp_path).opened(
        SPEC, resume=False
    ):  # fmt: skip
        pass
    with pytest.raises(RunDirError, match=r"no evaluation at .* to resume"), EvalFolder(tmp_path).opened(
        SPEC, resume=True
    ):  # fmt: skip
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_an_evaluation_without_results_may_start_over(tmp_path: Path) -> None:
    folder = EvalFolder(tmp_path / "one")
    for spec in (changed(env="typo"), SPEC):
        with folder.opened(spec, resume=False):
            assert folder.read_spec() == spec
    folder.results.write_bytes(msgspec.json.encode(result(0, 0)) + b"\n")
    with (
        pytest.raises(RunDirError, match="holds an evaluation already"),
        folder.opened(SPEC, resume=False),
    ):
        pass
    with folder.opened(SPEC, resume=True) as previous:
        assert list(previous) == [(0, 0)]


def test_two_processes_cannot_evaluate_in_one_folder(tmp_path: Path) -> None:
    folder = EvalFolder(tmp_path / "one")
    with (
        folder.opened(SPEC, resume=False),
        pytest.raises(RunDirError, match="another process evaluates"),
        EvalFolder(folder.path).opened(SPEC, resume=True),
    ):
        pass


@given(cut=st.integers(0, 400))
def test_an_incomplete_last_line_is_cut_off_and_the_rest_kept(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("torn") / "results.jsonl"
    encoded = [msgspec.json.encode(result(n, 0)) + b"\n" for n in range(3)]
    data = b"".join(encoded)[: len(b"".join(encoded)) - cut]
    path.write_bytes(data)
    num_complete = data.count(b"\n")
    assert set(read_results(path)) == {(n, 0) for n in range(num_complete)}
    assert path.read_bytes() == b"".join(encoded[:num_complete])


def test_a_broken_line_is_named_and_the_last_line_of_a_rollout_counts(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    twice = [result(0, 0, ok=False), result(0, 0)]
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in twice))
    assert read_results(path) == {(0, 0): result(0, 0)}
    path.write_bytes(b"oops\n" + msgspec.json.encode(twice[0]) + b"\n")
    with pytest.raises(RunDirError, match=r"results.jsonl:1 is not a result"):
        read_results(path)


def test_missing_and_failed_rollouts_run_and_groups_run_whole() -> None:
    previous: dict[ResultKey, RolloutResult] = {
        (0, 0): result(0, 0),
        (0, 1): result(0, 1, ok=False),
    }
    assert missing_rollouts(0, 3, previous, whole_groups=False) == [(1,), (2,)]
    assert missing_rollouts(0, 3, previous, whole_groups=True) == [(0, 1, 2)]
    assert missing_rollouts(0, 1, previous, whole_groups=True) == []
    assert missing_rollouts(1, 2, previous, whole_groups=False) == [(0,), (1,)]


@pytest.mark.anyio
async def test_a_full_disk_is_reported_in_one_line(tmp_path: Path) -> None:
    folder = EvalFolder(tmp_path / "full")
    with folder.opened(SPEC, resume=False):
        folder.results.symlink_to("/dev/full")
        with pytest.raises(RunDirError, match=r"cannot write to .*No space left"):
            async with open_recorder(folder) as recorder:
                await recorder.add(result(0, 0, ok=False), None)
