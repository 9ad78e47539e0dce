"""Answers questions about the state of a core: what may start, which environments are silent, what the
next step waits for, and why it can no longer complete. Only `may_start_group` changes something: it
notes in `admission.is_held_back` whether the payload budget alone is in the way."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from ...records.situation import CoreView
from ...records.task import Pool
from .rollouts.patience import MAX_QUIET_S

if TYPE_CHECKING:
    from .core import Core

POOLS: tuple[Pool, ...] = ("easy", "hard")


def view(core: "Core") -> CoreView:
    admission, ready = core.admission, core.shipping.ready
    return CoreView(
        step=core.shipping.next_step,
        version=core.weights.applied,
        waits_for=waits_for(core),
        in_flight=core.num_in_flight,
        max_in_flight=admission.concurrency.limit,
        ready=ready.num_rollouts,
        batch_size=ready.rollouts_a_batch,
        live_bytes=admission.budget.num_bytes,
        is_held_back=admission.is_held_back,
        num_retries=core.retries.num_retries,
        pools={pool: core.tasks.pooled(pool) for pool in POOLS},
        is_finished=core.finished and core.weights.published == core.spec.max_steps,
    )


def may_start_group(core: "Core", silent: Collection[str]) -> bool:
    """Return whether every bound leaves room for a group. Silent environments do not count. A run that
    samples and trains in turns evaluates in its own turn, so that one version is evaluated."""
    if core.evals.is_running and not core.spec.orchestrator.max_off_policy_steps:
        return False
    ready, groups = core.shipping.ready, core.groups
    open_rollouts = groups.num_rollouts - sum(groups.in_flight[env] for env in silent)
    num_training = core.shipping.next_step - 1 - core.weights.applied
    return core.admission.allows_group(
        in_flight=core.num_in_flight,
        unshipped=open_rollouts + core.closer.num_rollouts + ready.worth,
        training=num_training * ready.rollouts_a_batch,
        rollouts_a_batch=ready.rollouts_a_batch,
        steps_left=core.shipping.steps_left,
    )


def bound_of(core: "Core") -> str:
    """Name the key that keeps the next group from starting; empty if none does."""
    settings, ready, groups = core.spec.orchestrator, core.shipping.ready, core.groups
    if core.num_in_flight + settings.group_size > core.admission.concurrency.limit:
        return "orchestrator.max_in_flight"
    unshipped = groups.num_rollouts + core.closer.num_rollouts + ready.worth
    num_training = core.shipping.next_step - 1 - core.weights.applied
    most = core.spec.max_outstanding * ready.rollouts_a_batch / settings.batch_size
    if unshipped + num_training * ready.rollouts_a_batch >= most:
        return "orchestrator.batch_size × (1 + max_off_policy_steps)"
    if not core.admission.rate.allows:
        return "orchestrator.rollouts_a_minute"
    return "payload.budget_mb" if core.admission.is_held_back else ""


def needs_engine(core: "Core") -> bool:
    """Return whether the run samples again: for a batch, or for an evaluation after the last batch."""
    must_evaluate = core.evals.is_running or core.evals.is_due(core.spec.max_steps)
    return must_evaluate or not core.shipping.is_over


def silent_envs(core: "Core") -> tuple[str, ...]:
    """Return the environments that have not answered for too long: the others do not wait for them."""
    lost = [env for env in core.spec.ratios if core.patience.is_lost(env)]
    in_flight, tasks = core.groups.in_flight, core.tasks
    return tuple(env for env in lost if in_flight[env] or tasks.is_waiting_for(env))


def full_envs(core: "Core") -> tuple[str, ...]:
    size, in_flight = core.spec.orchestrator.group_size, core.groups.in_flight
    limits = core.admission.env_limits.items()
    return tuple(env for env, limit in limits if in_flight[env] + size > limit)


def waits_for(core: "Core") -> str:
    weights, shipping = core.weights, core.shipping
    if shipping.is_over:
        return _waits_for_at_the_end(core)
    if shipping.ready.is_full:
        return f"the trainer: it has published version {weights.published}"
    if not core.admission.has_disk:
        return "room on the disk of the run"
    if core.closer.num_groups:
        return f"advantages of {core.closer.num_groups} groups"
    if core.admission.is_held_back:
        return "payload to be trained: payload.budget_mb is used up"
    if core.groups.num_in_flight:
        return "rollouts"
    if weights.updating is not None:
        return f"the engine to load version {weights.updating}"
    if shipping.num_shipped:
        return "the trainer"
    if not core.admission.rate.allows:
        return "the next minute: orchestrator.rollouts_a_minute is used up"
    return "tasks of the environments"


def _waits_for_at_the_end(core: "Core") -> str:
    if core.weights.published < core.spec.max_steps:
        return "the trainer: the last batch is shipped"
    if core.weights.updating is not None:
        return f"the engine to load version {core.weights.updating}"
    return core.evals.waits_for or "rollouts that were cancelled"


def why_stuck(core: "Core") -> str:
    """Say why the run can no longer complete its next step; empty while it can."""
    if env := core.tasks.empty_env:
        return f"environment '{env}' has no tasks"
    if _is_starved(core):
        budget, num_ready = core.admission.budget, core.shipping.ready.num_rollouts
        return (
            f"a batch does not fit into payload.budget_mb: {num_ready} rollouts that wait for the rest "
            f"of their batch hold {budget.live_bytes} bytes, and each further one needs about "
            f"{budget.mean_bytes:.0f}; raise payload.budget_mb or lower orchestrator.batch_size"
        )
    if core.patience.is_stuck:
        return (
            f"nothing has happened for {MAX_QUIET_S:g} s: "
            f"step {core.shipping.next_step} waits for {waits_for(core)}"
        )
    return core.first_rollouts.reason or core.useless.reason


def _is_starved(core: "Core") -> bool:
    """Return whether nothing runs, nothing trains, and the payload budget lets nothing start."""
    is_waiting = (
        core.num_in_flight
        or core.closer.num_groups
        or core.shipping.num_shipped
        or core.weights.updating is not None
    )
    has_room = core.admission.budget.has_room(core.spec.orchestrator.group_size)
    return not is_waiting and not has_room and not core.shipping.is_over
