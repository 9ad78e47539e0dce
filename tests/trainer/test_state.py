"""The trainer's state has its final name only once all of it is on the disk."""

from pathlib import Path

import pytest
import torch
from tests.doubles.disk import record_disk_calls
from torch.nn import Parameter

from rollway.records.ids import PolicyVersion
from rollway.rundir.rundir import RunDir
from rollway.trainer.state import TrainerState


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_state_is_on_the_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, weight = RunDir(tmp_path), Parameter(torch.ones(2))
    run.make_folders()
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(2)
    optimizer.step()
    state = TrainerState(run, {"w": weight}, optimizer)
    state.begin_save(PolicyVersion(3))
    assert state._writing is not None
    state._writing[1].result()
    files = {path.name for path in (run.trainer / "partial_step_3").iterdir()}
    done = record_disk_calls(monkeypatch)
    state.finish_save()
    *synced, named, last = done
    assert set(synced) == {f"sync {name}" for name in files | {"partial_step_3", "trainer"}}
    assert (named, last) == ("name step_3", "sync trainer")
    assert state.saved == run.last_state(PolicyVersion(3)) == 3
