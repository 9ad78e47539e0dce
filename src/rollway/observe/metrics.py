"""Every metric rollway reports: its name, unit and meaning stand here and nowhere else."""

from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any, get_args

import msgspec
from msgspec import Struct

from ..records.batch import BatchManifest
from ..records.group import ClosedGroup
from ..records.lag import LAG_STATS, LagStats, Stall
from ..records.rollout import Detection, Scored


class Metric(Struct, frozen=True):
    """A declaration. A word in braces stands for a reward, process, …, and is a label in Prometheus."""

    name: str
    unit: str
    meaning: str
    is_live: bool = False
    """Told once a second, not only once a step."""
    is_summed: bool = False
    """What Prometheus sees only ever grows; in `metrics.jsonl` it is that of one step."""
    is_exported: bool = True
    """Whether Prometheus sees it; not if another metric says the same there."""


DECLARED = (
    Metric("step", "step", "optimizer step, from 1"),
    Metric("time/step", "s", "from the last version published to this one"),
    Metric("reward/all/mean", "reward", "mean over all rollouts scored since the last step"),
    Metric("reward/all/std", "reward", "standard deviation of the same"),
    Metric("reward/{reward}/mean", "reward", "mean of one reward function, before its weight"),
    Metric("metric/{metric}/mean", "", "mean of one metric function of an environment"),
    Metric("solve_all", "fraction", "groups in which every rollout had the highest reward"),
    Metric("solve_none", "fraction", "groups in which every rollout had the lowest reward"),
    Metric("seq_len/mean", "tokens", "mean tokens of a rollout, prompts included"),
    Metric("completion_len/mean", "tokens", "mean sampled tokens of a rollout"),
    Metric("num_turns/mean", "turns", "mean turns of a rollout"),
    Metric("truncated", "fraction", "rollouts whose last turn hit its token limit"),
    Metric("off_policy/mean", "versions", "mean staleness of the rollouts trained"),
    Metric("off_policy/max", "versions", "greatest staleness of the rollouts trained"),
    Metric("filters/zero_advantage", "fraction", "groups left out because all rewards are equal"),
    Metric("filters/{sign}", "fraction", "rollouts with a sign of text gone wrong"),
    Metric("filters/left_out", "rollouts", "rollouts of trained groups left out by a filter"),
    Metric("filters/stale", "groups", "groups left out because they were too old"),
    Metric("errors/{boundary}", "rollouts", "failed rollouts by boundary"),
    Metric("errors/cancelled", "rollouts", "cancelled rollouts"),
    Metric("batch/rollouts", "rollouts", "rollouts trained in this step"),
    Metric("batch/rows", "rows", "rows trained in this step"),
    Metric("batch/tokens", "tokens", "tokens of these rows"),
    Metric("batch/micro_batches", "", "forward passes of this step, of all ranks"),
    Metric("throughput/tokens", "tokens/s", "tokens sampled and scored, per second of this step"),
    Metric("throughput/rollouts", "rollouts/s", "rollouts scored, per second of this step"),
    Metric("timing/{phase}/mean", "s", "mean seconds of a rollout in one phase: engine, env, scoring"),
    Metric("in_flight", "rollouts", "rollouts running, when the step ended", is_live=True),
    Metric("ready", "rollouts", "rollouts that wait for the rest of their batch", is_live=True),
    Metric("payload/live_bytes", "bytes", "payload not yet released", is_live=True),
    Metric("payload/held_back", "", "1 while the budget keeps rollouts from starting", is_live=True),
    Metric("max_in_flight", "rollouts", "rollouts that may run; moves with `adapt_in_flight`"),
    Metric("retries", "rollouts", "rollouts run again since the start, because they failed"),
    Metric("pool/{env}/{pool}", "tasks", "tasks of an environment that are easy, or hard"),
    Metric("eval/{env}/avg@{k}", "reward", "mean reward of the evaluation's k rollouts a task"),
    Metric("eval/{env}/pass@{k}", "fraction", "tasks that one of k rollouts passes, estimated"),
    Metric("eval/{env}/completion_len/mean", "tokens", "mean sampled tokens of a rollout"),
    Metric("eval/{env}/truncated", "fraction", "rollouts whose last turn hit its token limit"),
    Metric("eval/{env}/failed", "fraction", "rollouts that failed or were cancelled; not in the means"),
    Metric("eval/{env}/tasks", "tasks", "tasks with at least one scored rollout"),
    Metric("eval/{env}/version/min", "version", "oldest that drew a first token: the one evaluated"),
    Metric("eval/{env}/version/max", "version", "newest that drew a token: weights go on changing"),
    Metric("loss", "", "policy-gradient loss"),
    Metric("grad_norm", "", "norm of the gradient before clipping"),
    Metric("clip_fraction", "fraction", "trainable tokens whose importance ratio was clipped"),
    Metric("ratio/mean", "", "mean importance ratio of trainer to engine"),
    Metric("mismatch_kl", "nats", "estimated KL divergence of the engine from the trainer"),
    Metric("entropy", "nats", "mean entropy of the trainer's distribution on trained tokens"),
    Metric("lr", "", "learning rate"),
    Metric("time/wait_rollouts", "s", "from the last batch shipped to this one being complete"),
    Metric("time/hold", "s", "this batch complete, and held until the trainer was near enough"),
    Metric("time/credit", "s", "in which groups waited for an advantage function of your own"),
    Metric("time/ship", "s", "from the decision to ship to the manifest being written"),
    Metric("time/open", "s", "from the manifest being written to its opening by the trainer"),
    Metric("time/train", "s", "forward and backward passes and the update"),
    Metric("time/publish", "s", "writing the weights, and the checkpoint if it was time for one"),
    Metric("time/update_weights", "s", "the engine's last loading of weights that ended in this step"),
    Metric("event_loop_lag/{stat}", "s", "lateness of the orchestrator's loop: min mean med p90 p99 max",
           is_exported=False),
    Metric("event_loop_lag/{process}/{stat}", "s", "the same of one process's loop", is_live=True),
    Metric("stalls/{process}/count", "", "how often a loop was held longer than watch.stall_ms",
           is_live=True, is_summed=True),
    Metric("stalls/{process}/seconds", "s", "how long in all", is_live=True, is_summed=True),
    Metric("slow_calls/{process}/count", "", "calls in a process's lanes longer than watch.stall_ms",
           is_live=True, is_summed=True),
    Metric("slow_calls/{process}/seconds", "s", "how long in all", is_live=True, is_summed=True),
    Metric("rss/{process}", "bytes", "resident memory of one process", is_live=True),
    Metric("process_in_flight/{process}", "rollouts", "rollouts one process has to do with",
           is_live=True),
)  # fmt: skip


def step_metrics(
    manifest: BatchManifest, closed: Iterable[ClosedGroup], elapsed_s: float
) -> dict[str, float]:
    """The metrics of a step, from the groups that closed for it. Pure."""
    groups = list(closed)
    scored = [member.scored for one in groups for member in one.group.members]
    trained = [
        member.scored for one in groups if one.fate == "trained"
        for member in one.group.members if member.rollout_id not in one.left_out
    ]  # fmt: skip
    return {
        "step": manifest.step,
        "time/step": elapsed_s,
        **_rewards(scored),
        **_lengths(scored),
        **_groups(groups),
        **_signs(scored),
        "filters/left_out": sum(len(one.left_out) for one in groups if one.fate == "trained"),
        **_errors(groups),
        **_staleness(trained, manifest.trains_version),
        "batch/rollouts": len(trained),
        "batch/rows": len(manifest.rows),
        "batch/tokens": manifest.num_tokens,
        "batch/micro_batches": len(manifest.micro_batches),
        "throughput/tokens": sum(one.num_trainable for one in scored) / elapsed_s,
        "throughput/rollouts": len(scored) / elapsed_s,
    }


def _rewards(scored: list[Scored]) -> dict[str, float]:
    if not scored:
        return {}
    values = [one.reward for one in scored]
    mean = fmean(values)
    return {
        "reward/all/mean": mean,
        "reward/all/std": fmean([(value - mean) ** 2 for value in values]) ** 0.5,
        **_means("reward", [one.rewards for one in scored]),
        **_means("metric", [one.metrics for one in scored]),
    }


def _means(kind: str, records: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for record in records for name in record)
    return {
        f"{kind}/{name}/mean": fmean([record[name] for record in records if name in record])
        for name in names
    }


def _lengths(scored: list[Scored]) -> dict[str, float]:
    if not scored:
        return {}
    return {
        "seq_len/mean": fmean([one.num_tokens for one in scored]),
        "completion_len/mean": fmean([one.num_trainable for one in scored]),
        "num_turns/mean": fmean([one.num_turns for one in scored]),
        "truncated": fmean([one.stop == "length" for one in scored]),
        "timing/engine/mean": fmean([one.timing.engine_s for one in scored]),
        "timing/env/mean": fmean([one.timing.env_s for one in scored]),
        "timing/scoring/mean": fmean([one.timing.scoring_s for one in scored]),
    }


def _groups(groups: list[ClosedGroup]) -> dict[str, float]:
    full = [one for one in groups if one.group.members]
    if not full:
        return {}
    rewards = [[member.scored.reward for member in one.group.members] for one in full]
    best, worst = max(map(max, rewards)), min(map(min, rewards))
    flat = [min(one) == max(one) for one in rewards]
    return {
        "solve_all": fmean([f and one[0] == best for f, one in zip(flat, rewards, strict=True)]),
        "solve_none": fmean([f and one[0] == worst for f, one in zip(flat, rewards, strict=True)]),
        "filters/zero_advantage": fmean([one.fate == "zero_advantage" for one in full]),
        "filters/stale": sum(one.fate == "stale" for one in full),
    }


def _signs(scored: list[Scored]) -> dict[str, float]:
    if not scored:
        return {}
    shown = [{sign for row in one.rows for sign in row.detected} for one in scored]
    return {f"filters/{sign}": fmean([sign in one for one in shown]) for sign in get_args(Detection)}


def _errors(groups: list[ClosedGroup]) -> dict[str, float]:
    counts: dict[str, float] = {}
    for one in groups:
        for _, failed in one.group.failed:
            name = f"errors/{failed.boundary}"
            counts[name] = counts.get(name, 0) + 1
    cancelled = sum(len(one.group.cancelled) for one in groups)
    return {**counts, "errors/cancelled": cancelled} if cancelled else counts


def _staleness(trained: list[Scored], version: int) -> dict[str, float]:
    if not trained:
        return {}
    staleness = [version - one.first_version for one in trained]
    return {"off_policy/mean": fmean(staleness), "off_policy/max": max(staleness)}


def lag_metrics(lags: Mapping[str, LagStats]) -> dict[str, float]:
    """Of every process, and the orchestrator's once more under the name other tools know."""
    own = lags.get("orchestrator")
    return {
        **({f"event_loop_lag/{stat}": getattr(own, stat) for stat in LAG_STATS} if own else {}),
        **{
            f"event_loop_lag/{process}/{stat}": getattr(lag, stat)
            for process, lag in lags.items()
            for stat in LAG_STATS
        },
    }


def stall_metrics(stalls: Mapping[str, Iterable[Stall]]) -> dict[str, float]:
    """How often and how long each process's loop was held, and calls in its lanes took too long."""
    metrics: dict[str, float] = {}
    for process, culprits in stalls.items():
        for one in culprits:
            name = f"{'stalls' if one.kind == 'loop' else 'slow_calls'}/{process}"
            metrics[f"{name}/count"] = metrics.get(f"{name}/count", 0) + one.count
            metrics[f"{name}/seconds"] = metrics.get(f"{name}/seconds", 0.0) + one.total_s
    return metrics


def stall_records(stalls: Mapping[str, Iterable[Stall]]) -> list[dict[str, Any]]:
    """The culprits themselves, for a line of `metrics.jsonl`."""
    return [
        {"process": process, **msgspec.to_builtins(one)}
        for process, culprits in stalls.items()
        for one in culprits
    ]
