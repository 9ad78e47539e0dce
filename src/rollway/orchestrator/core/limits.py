"""The bounds and policies of a run."""

from typing import Annotated

from msgspec import Meta, Struct, field

from ...records.rollout import Boundary, Detection

Fraction = Annotated[float, Meta(ge=0, le=1)]
NEVER = float("inf")


class RetryRule(Struct, frozen=True):
    """How often a rollout that failed may run again, by whose failure it was."""

    times: dict[Boundary, int] = field(default_factory=dict)
    budget: Fraction = 0.0
    """Retries of all rollouts started, at most."""


class DifficultyRule(Struct, frozen=True):
    """When a task leaves the normal pool, and which share of groups the other pools get."""

    easy_at: float = NEVER
    hard_at: float = -NEVER
    easy_share: Fraction = 0.0
    hard_share: Fraction = 0.0


class EvalRule(Struct, frozen=True):
    """Which versions are evaluated, on what, and how much of what runs may be evaluation."""

    every: int
    num_tasks: int
    num_rollouts: int
    share: Fraction
    at_start: bool
    envs: tuple[str, ...]


class Limits(Struct, frozen=True):
    """Everything the core is told before a run."""

    batch_size: int
    group_size: int
    max_in_flight: int
    max_outstanding: int
    max_off_policy_steps: int
    max_fruitless_groups: int
    max_steps: int
    micro_batch_tokens: int
    payload_bytes: int
    drop_zero_advantage: bool
    ranks: int = 1
    """Of the trainer: micro-batches are planned for each."""
    batch_tokens: int = 0
    """Tokens of a batch; 0 counts rollouts."""
    adapts: bool = False
    """Whether fewer run while the engine or the workers are overloaded."""
    rollouts_a_minute: float = NEVER
    patience_s: float = NEVER
    """Silence of an environment after which others train without it."""
    quiet_s: float = NEVER
    """When nothing at all has moved for so long, the run gives up."""
    cut_after: Fraction = 1.0
    """The share of a group that must have settled before its stragglers may be cut; 1 never cuts."""
    cut_wait_s: float = 0.0
    """How long stragglers may go on then."""
    enforced: frozenset[Detection] = frozenset()
    """Signs that keep a rollout from training."""
    asks_for_credit: bool = False
    """Whether advantages come from outside, by `Credit` and `Credited`, instead of from `baseline`."""
    baseline: str = "grpo"
    length_penalty: float = 0.0
    length_by_turns: bool = False
    correct_at: float = 1.0
    retries: RetryRule = RetryRule()
    difficulty: DifficultyRule = DifficultyRule()
    evals: EvalRule | None = None
