"""The run directory: which folders stay, which are removed, and that many may remove them at once."""

import multiprocessing
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest

from rollway.config.sections import OrchestratorConfig
from rollway.errors import RunDirError
from rollway.records.ids import PolicyVersion, Step
from rollway.rundir.rundir import REMOVED, STABLE, RunDir, remove_folder

NUM_VERSIONS = 12
NUM_FILES = 60
NUM_REMOVERS = 4


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.make_folders()
    return run


def fill(folder: Path, num_files: int = 1) -> None:
    folder.mkdir(parents=True)
    (folder / STABLE).write_bytes(b"{}")
    for number in range(num_files):
        (folder / f"shard_{number}").write_bytes(b"weights")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def prune_weights(path: Path) -> int:
    """Prune after every version, as a run does, until one is left."""
    run = RunDir(path)
    for version in range(1, NUM_VERSIONS + 1):
        run.prune_weights(version, keep=1)
    return run.last_published()


def prune_checkpoints(path: Path) -> int | None:
    """Prune to fewer and fewer checkpoints, until one is left."""
    run = RunDir(path)
    for keep in range(NUM_VERSIONS, 0, -1):
        run.prune_checkpoints(keep)
    return run.last_checkpoint()


def threads() -> Executor:
    """Threads that begin once all of them have started."""
    return ThreadPoolExecutor(NUM_REMOVERS, initializer=threading.Barrier(NUM_REMOVERS).wait)


def processes() -> Executor:
    """Processes that begin once all of them have started."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(NUM_REMOVERS)
    return ProcessPoolExecutor(NUM_REMOVERS, context, initializer=barrier.wait)


@pytest.mark.parametrize("start", [threads, processes])
@pytest.mark.parametrize("prune", [prune_weights, prune_checkpoints])
def test_many_may_prune_the_same_folders_at_once(
    run: RunDir, prune: Callable[[Path], int], start: Callable[[], Executor]
) -> None:
    folder = run.weights if prune is prune_weights else run.checkpoints
    for version in range(1, NUM_VERSIONS + 1):
        fill(folder / f"step_{version}", NUM_FILES)
    with start() as executor:
        prunings = [executor.submit(prune, run.path) for _ in range(NUM_REMOVERS)]
        assert [pruning.result() for pruning in prunings] == [NUM_VERSIONS] * NUM_REMOVERS
    assert names(folder) == [f"step_{NUM_VERSIONS}"]
    assert len(names(folder / f"step_{NUM_VERSIONS}")) == NUM_FILES + 1, (
        "the newest is untouched"
    )


def test_a_folder_is_found_complete_or_not_found(run: RunDir) -> None:
    """A reader that misses one file of a version that is being removed misses all of them."""
    fill(run.weights_of(PolicyVersion(1)), num_files=1000)
    first, *_, last = run.weights_of(PolicyVersion(1)).iterdir()  # removed in this order

    def read() -> bool:
        while first.exists():
            pass
        return last.exists()

    with ThreadPoolExecutor(1) as executor:
        reading = executor.submit(read)
        run.prune_weights(1, keep=0)
        assert not reading.result()


def test_leftovers_of_a_killed_remover_go_with_the_next_removal(run: RunDir) -> None:
    fill(run.weights_of(PolicyVersion(1)))
    fill(run.weights / f"{REMOVED}0123")
    remove_folder(run.weights_of(PolicyVersion(1)))
    assert names(run.weights) == []


def test_a_folder_that_may_not_be_removed_is_an_error(run: RunDir) -> None:
    """Only what another process removed is passed over in silence."""
    (run.weights / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        remove_folder(run.weights / "file" / "step_1")


def test_keep_weights_versions_stay_behind_the_current_one(run: RunDir) -> None:
    config = OrchestratorConfig(keep_weights=3)
    (run.weights / "step_of_the_user").mkdir()
    for version in range(1, 8):
        fill(run.weights_of(PolicyVersion(version)))
    run.prune_weights(6, config.keep_weights)
    assert names(run.weights) == ["step_4", "step_5", "step_6", "step_7", "step_of_the_user"]
    assert run.last_published() == 7
    run.prune_weights(1, config.keep_weights)
    assert len(names(run.weights)) == 5, "nothing is that old"


def test_a_checkpoint_keeps_weights_and_state_and_the_newest_ones_stay(run: RunDir) -> None:
    for step in (5, 10, 15, 20):
        version = PolicyVersion(step)
        fill(run.weights_of(version))
        run.begin_checkpoint(version)
        remove_folder(run.weights_of(version))
        assert run.last_checkpoint() != step, "the trainer's state is not there yet"
        fill(run.state_of(version))
        run.finish_checkpoint(version)
        run.prune_checkpoints(keep=2)
    fill(run.checkpoints / "partial_step_25")
    assert names(run.checkpoints) == ["partial_step_25", "step_15", "step_20"]
    run.remove_partial()
    assert names(run.checkpoints) == ["step_15", "step_20"]
    assert names(run.checkpoint(Step(20))) == ["STABLE", "shard_0", "trainer"]


def test_what_a_restart_of_the_trainer_needs_stays(run: RunDir) -> None:
    for version in (3, 6, 9):
        fill(run.state_of(PolicyVersion(version)))
    for step in range(4, 12):
        run.order_of(Step(step)).write_bytes(b"")
    (run.trainer / "batch_mine.msgpack").write_bytes(b"")
    assert run.last_state(PolicyVersion(8)) == 6
    run.prune_trainer(PolicyVersion(9))
    kept = ["batch_10.msgpack", "batch_11.msgpack", "batch_mine.msgpack", "step_9"]
    assert names(run.trainer) == kept
    assert run.last_state(PolicyVersion(8)) is None


def test_steps_that_are_trained_again_leave_nothing_behind(run: RunDir) -> None:
    for step in range(1, 4):
        fill(run.weights_of(PolicyVersion(step)))
        fill(run.checkpoint(Step(step)))
    run.metrics.write_bytes(b'{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    run.remove_steps_after(Step(2))
    assert names(run.weights) == names(run.checkpoints) == ["step_1", "step_2"]
    assert run.metrics.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_a_batch_goes_with_its_saved_rollouts_and_evaluations_stay_until_they_run_again(
    run: RunDir,
) -> None:
    for step in (1, 2):
        for path in (
            run.manifest(Step(step)),
            run.saved_rollouts(Step(step)),
            run.saved_evals(PolicyVersion(step)),
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"{}\n")
    run.evals.write_bytes(b'{"step": 0}\n{"step": 1}\n')
    run.remove_evals_after(0)
    assert names(run.rollouts / "step_1") == ["train.jsonl"]
    assert run.evals.read_bytes() == b'{"step": 0}\n'
    run.remove_batch(Step(2))
    run.remove_batch(Step(2))
    assert names(run.batches) == names(run.rollouts) == ["step_1"]


def test_a_locked_run_keeps_a_second_process_out(run: RunDir) -> None:
    run.config.write_text("")
    with run.lock():
        with pytest.raises(RunDirError, match="another process trains in"), run.lock():
            pytest.fail("two hold the lock")
        shutil.rmtree(run.logs)
        with pytest.raises(RunDirError, match="another process trains in"), run.lock():
            pytest.fail("the lock went with the logs")
        with pytest.raises(RunDirError, match="another process trains in"):
            run.clean()
    run.clean()
    assert not run.path.exists()


def test_a_directory_that_is_taken_away_or_replaced_is_noticed(run: RunDir) -> None:
    place = run.identify()
    fill(run.weights_of(PolicyVersion(1)))
    assert run.identify() == place != (0, 0), "what is in it may change"
    run.path.rename(run.path.with_name("elsewhere"))
    assert run.identify() == (0, 0)
    run.make_folders()
    assert run.identify() not in (place, None)
    assert "was removed or replaced while the run was using it" in str(run.removed())
