"""Builds specs, orders and outcomes for tests of the core."""

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct

from rollway.config.sections import OrchestratorConfig, RetriesConfig
from rollway.config.specs import CoreSpec
from rollway.orchestrator.core.commands import Dispatch
from rollway.records.ids import GroupId, PolicyVersion, RolloutId
from rollway.records.payload import PayloadRef
from rollway.records.rollout import RowSummary, Scored, Timing
from rollway.records.task import Split, Task


def core_spec(**changes: Any) -> CoreSpec:
    """A small run. Keys of `[orchestrator]` and fields of CoreSpec may be changed alike."""
    orchestrator: dict[str, Any] = {
        "batch_size": 8,
        "group_size": 4,
        "max_in_flight": 16,
        "max_off_policy_steps": 1,
        "max_useless_groups": 1000,
        "env_patience_s": 1e9,
    }
    spec: dict[str, Any] = {
        "ratios": {"env": 1.0},
        "max_steps": 6,
        "max_outstanding": 16,
        "payload_bytes": 1 << 30,
        "micro_batch_tokens": 100,
        "retries": RetriesConfig(engine=0, worker=0),
    }
    for key, value in changes.items():
        (spec if key in CoreSpec.__struct_fields__ else orchestrator)[key] = value
    return CoreSpec(orchestrator=msgspec.convert(orchestrator, OrchestratorConfig), **spec)


class Order(Struct, frozen=True):
    """One rollout that the core wants started."""

    rollout_id: RolloutId
    group_id: GroupId
    env: str
    task: Task
    version: PolicyVersion
    position: int
    split: Split


def orders_in(commands: Iterable[Any]) -> list[Order]:
    """The rollouts that commands start, one by one."""
    return [
        Order(
            rollout_id,
            command.group_id,
            command.env,
            command.task,
            command.version,
            command.position,
            command.split,
        )
        for command in commands
        if isinstance(command, Dispatch)
        for rollout_id in command.rollout_ids
    ]


def scored(reward: float, version: int, number: int = 0) -> Scored:
    return Scored(
        reward=reward,
        rewards={"r": reward},
        metrics={},
        rows=(RowSummary(10, 5),),
        ref=PayloadRef("w0.0-0000.seg", 64 * number, 64),
        num_turns=1,
        stop="stop",
        first_version=PolicyVersion(version),
        last_version=PolicyVersion(version),
        timing=Timing(0, 0, 0, 0),
    )
