"""From the config's words to what the core is told."""

from ...config.sections import DifficultyConfig, EvalConfig, FiltersConfig, RetriesConfig
from ...config.specs import OrchestratorSpec
from ...records.rollout import Boundary, Detection
from ..core.limits import NEVER, DifficultyRule, EvalRule, Limits, RetryRule
from .advantage import is_built_in


def limits(part: OrchestratorSpec) -> Limits:
    wants = part.orchestrator
    return Limits(
        batch_size=wants.batch_size,
        batch_tokens=wants.batch_tokens,
        group_size=wants.group_size,
        max_in_flight=wants.max_in_flight,
        adapts=wants.adapt_in_flight,
        rollouts_a_minute=wants.rollouts_a_minute or NEVER,
        max_outstanding=part.max_outstanding,
        max_off_policy_steps=wants.max_off_policy_steps,
        max_fruitless_groups=wants.max_fruitless_groups,
        max_steps=part.max_steps,
        micro_batch_tokens=part.micro_batch_tokens,
        ranks=part.ranks,
        payload_bytes=part.payload.budget_mb << 20,
        patience_s=wants.env_patience_s,
        quiet_s=wants.max_quiet_s,
        cut_after=wants.stragglers_after,
        cut_wait_s=wants.stragglers_wait_s,
        drop_zero_advantage=part.filters.zero_advantage == "enforce",
        enforced=_enforced(part.filters),
        asks_for_credit=not is_built_in(wants.advantage),
        baseline=wants.advantage,
        length_penalty=wants.length_penalty,
        length_by_turns=wants.length_penalty_by == "turns",
        correct_at=wants.correct_at,
        retries=_retries(part.retries),
        difficulty=_difficulty(part.difficulty),
        evals=_evals(part.eval, tuple(env.id for env in part.envs)),
    )


def _enforced(filters: FiltersConfig) -> frozenset[Detection]:
    modes: dict[Detection, str] = {"gibberish": filters.gibberish, "repetition": filters.repetition}
    return frozenset(sign for sign, mode in modes.items() if mode == "enforce")


def _retries(wants: RetriesConfig) -> RetryRule:
    times: dict[Boundary, int] = {
        "env": wants.env, "engine": wants.engine, "scorer": wants.scorer, "deadline": wants.deadline,
        "worker": wants.worker,
    }  # fmt: skip
    return RetryRule(times, wants.budget)


def _difficulty(wants: DifficultyConfig) -> DifficultyRule:
    easy_at = NEVER if wants.easy_at is None else wants.easy_at
    hard_at = -NEVER if wants.hard_at is None else wants.hard_at
    return DifficultyRule(easy_at, hard_at, wants.easy_share, wants.hard_share)


def _evals(wants: EvalConfig, all_envs: tuple[str, ...]) -> EvalRule | None:
    if not wants.every:
        return None
    return EvalRule(
        every=wants.every,
        num_tasks=wants.num_tasks,
        num_rollouts=wants.num_rollouts,
        share=wants.share,
        at_start=wants.at_start,
        envs=wants.envs or all_envs,
    )
