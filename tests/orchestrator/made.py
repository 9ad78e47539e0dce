"""Limits and outcomes, made for tests."""

from typing import Any

from rollway.orchestrator.core.limits import Limits
from rollway.records.ids import PolicyVersion
from rollway.records.payload import PayloadRef
from rollway.records.rollout import RowSummary, Scored, Timing


def limits(**changes: Any) -> Limits:
    defaults: dict[str, Any] = {
        "batch_size": 8,
        "group_size": 4,
        "max_in_flight": 16,
        "max_outstanding": 16,
        "max_off_policy_steps": 1,
        "max_fruitless_groups": 1000,
        "max_steps": 6,
        "micro_batch_tokens": 100,
        "payload_bytes": 1 << 30,
        "drop_zero_advantage": True,
    }
    return Limits(**{**defaults, **changes})


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
