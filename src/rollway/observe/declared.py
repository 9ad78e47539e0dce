"""Every metric rollway reports: its name, unit and meaning stand here and nowhere else.

To add one, write a line below where it belongs, report it under that name, and run `make docs`.
`metrics.jsonl`, Prometheus, W&B, TensorBoard and docs/metrics.md follow.
"""

import re
from functools import cache

from msgspec import Struct

LABEL = re.compile(r"\{(\w+)\}")


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

    @property
    def labels(self) -> list[str]:
        return LABEL.findall(self.name)

    @property
    def pattern(self) -> re.Pattern[str]:
        """What its names look like, with a group for each label."""
        return re.compile(LABEL.sub(r"(?P<\1>[^/]+)", self.name))


SECTIONS: dict[str, tuple[Metric, ...]] = {
    "Rewards": (
        Metric("reward/all/mean", "reward", "mean over all rollouts scored since the last step"),
        Metric("reward/all/std", "reward", "standard deviation of the same"),
        Metric("reward/{reward}/mean", "reward", "mean of one reward function, before its weight"),
        Metric("metric/{metric}/mean", "", "mean of one metric function of an environment"),
        Metric("solve_rate", "fraction", "rollouts that are right: a reward of `correct_at` or more"),
        Metric("solve_all", "fraction", "groups in which every rollout is right"),
        Metric("solve_none", "fraction", "groups in which none is"),
    ),
    "By environment": (
        Metric("env/{env}/reward/mean", "reward", "mean over its rollouts"),
        Metric("env/{env}/solve_rate", "fraction", "its rollouts that are right"),
        Metric("env/{env}/completion_len/mean", "tokens", "mean sampled tokens of its rollouts"),
        Metric("env/{env}/num_turns/mean", "turns", "mean turns of its rollouts"),
        Metric("env/{env}/truncated", "fraction", "its rollouts that a token limit ended"),
        Metric("env/{env}/rollouts", "rollouts", "its rollouts that were scored"),
        Metric("env/{env}/errors", "rollouts", "its rollouts that failed, whatever the boundary"),
    ),
    "Lengths and ends": (
        Metric("seq_len/mean", "tokens", "mean tokens of a rollout, prompts included"),
        Metric("seq_len/max", "tokens", "the longest"),
        Metric("completion_len/mean", "tokens", "mean sampled tokens of a rollout"),
        Metric("completion_len/max", "tokens", "the most"),
        Metric("num_turns/mean", "turns", "mean turns of a rollout"),
        Metric("num_turns/max", "turns", "the most"),
        Metric("truncated", "fraction", "rollouts whose end was a turn that hit its token limit"),
        Metric("stop/{condition}", "fraction", "rollouts by what ended them: a stop condition's name, "
               "`max_turns`, `max_tokens`, or how the last turn ended (`stop`, `length`)"),
        Metric("scored/rollouts", "rollouts", "rollouts scored for this step, trained or not"),
        Metric("scored/tokens", "tokens", "tokens they sampled"),
    ),
    "Filters and staleness": (
        Metric("filters/zero_advantage", "fraction", "groups left out because all rewards are equal"),
        Metric("filters/{sign}", "fraction", "rollouts with a sign of text gone wrong"),
        Metric("filters/left_out", "rollouts", "rollouts of trained groups left out by a filter"),
        Metric("filters/filtered", "groups", "groups of which a filter left nothing"),
        Metric("filters/too_few", "groups", "groups left out because fewer than two were scored"),
        Metric("filters/stale", "groups", "groups left out because they were too old"),
        Metric("off_policy/mean", "versions", "mean staleness of the rollouts trained"),
        Metric("off_policy/max", "versions", "greatest staleness of the rollouts trained"),
    ),
    "Failures": (
        Metric("errors/{boundary}", "rollouts", "failed rollouts by boundary: env, engine, scorer, "
               "deadline, worker"),
        Metric("errors/cancelled", "rollouts", "cancelled rollouts"),
    ),
    "The batch": (
        Metric("step", "step", "optimizer step, from 1"),
        Metric("time", "s", "when the step was reported, since 1970", is_exported=False),
        Metric("batch/rollouts", "rollouts", "rollouts trained in this step"),
        Metric("batch/rows", "rows", "rows trained in this step"),
        Metric("batch/tokens", "tokens", "tokens of these rows"),
        Metric("batch/micro_batches", "", "forward passes of this step, of all ranks"),
        Metric("throughput/tokens", "tokens/s", "tokens sampled and scored, per second of this step"),
        Metric("throughput/rollouts", "rollouts/s", "rollouts scored, per second of this step"),
        Metric("in_flight", "rollouts", "rollouts running, when the step ended", is_live=True),
        Metric("ready", "rollouts", "rollouts that wait for the rest of their batch", is_live=True),
        Metric("payload/live_bytes", "bytes", "payload not yet released", is_live=True),
        Metric("payload/held_back", "", "1 while the budget keeps rollouts from starting", is_live=True),
        Metric("max_in_flight", "rollouts", "rollouts that may run; moves with `adapt_in_flight`"),
        Metric("retries", "rollouts", "rollouts run again since the start, because they failed"),
        Metric("pool/{env}/{pool}", "tasks", "tasks of an environment that are easy, or hard"),
    ),
    "Evaluations, in `evals.jsonl`": (
        Metric("eval/{env}/avg@{k}", "reward", "mean reward of the evaluation's k rollouts a task"),
        Metric("eval/{env}/pass@{k}", "fraction", "tasks that one of k rollouts passes, estimated"),
        Metric("eval/{env}/completion_len/mean", "tokens", "mean sampled tokens of a rollout"),
        Metric("eval/{env}/truncated", "fraction", "rollouts whose last turn hit its token limit"),
        Metric("eval/{env}/failed", "fraction", "rollouts that failed or were cancelled; the means are "
               "without them"),
        Metric("eval/{env}/tasks", "tasks", "tasks with at least one scored rollout"),
        Metric("eval/{env}/version/min", "version", "oldest that drew a first token: the one evaluated"),
        Metric("eval/{env}/version/max", "version", "newest that drew a token: weights go on changing"),
    ),
    "The optimizer": (
        Metric("loss", "", "policy-gradient loss"),
        Metric("grad_norm", "", "norm of the gradient before clipping"),
        Metric("clip_fraction", "fraction", "trainable tokens whose importance ratio was clipped"),
        Metric("ratio/mean", "", "mean importance ratio of trainer to engine"),
        Metric("mismatch_kl", "nats", "estimated KL divergence of the engine from the trainer"),
        Metric("entropy", "nats", "mean entropy of the trainer's distribution on trained tokens"),
        Metric("lr", "", "learning rate"),
    ),
    "Where a rollout's time goes": (
        Metric("timing/{phase}/mean", "s", "mean seconds of a rollout by phase: `queue` (sent to the "
               "env server, not yet in a worker), then `engine`, `env`, `scoring`, and `total` of these "
               "three"),
        Metric("timing/{phase}/max", "s", "the slowest rollout's"),
    ),
    "Where a step's time goes": (
        Metric("time/step", "s", "from the last version published to this one"),
        Metric("time/wait_rollouts", "s", "from the last batch shipped to this one being complete"),
        Metric("time/hold", "s", "this batch complete, and held until the trainer was near enough"),
        Metric("time/credit", "s", "in which groups waited for an advantage function of your own"),
        Metric("time/ship", "s", "from the decision to ship to the manifest being written"),
        Metric("time/open", "s", "from the manifest being written to its opening by the trainer"),
        Metric("time/train", "s", "forward and backward passes and the update"),
        Metric("time/publish", "s", "writing the weights, and the checkpoint if it was time for one"),
        Metric("time/update_weights", "s", "the engine's last loading of weights that ended in this "
               "step"),
    ),
    "Processes": (
        Metric("event_loop_lag/{stat}", "s", "lateness of the orchestrator's loop: min mean med p90 p99 "
               "max", is_exported=False),
        Metric("event_loop_lag/{process}/{stat}", "s", "the same of one process's loop", is_live=True),
        Metric("stalls/{process}/count", "", "how often a loop was held longer than `watch.stall_ms`",
               is_live=True, is_summed=True),
        Metric("stalls/{process}/seconds", "s", "how long in all", is_live=True, is_summed=True),
        Metric("slow_calls/{process}/count", "", "calls in a process's lanes longer than "
               "`watch.stall_ms`", is_live=True, is_summed=True),
        Metric("slow_calls/{process}/seconds", "s", "how long in all", is_live=True, is_summed=True),
        Metric("rss/{process}", "bytes", "resident memory of one process", is_live=True),
        Metric("process_in_flight/{process}", "rollouts", "rollouts one process has to do with; told to "
               "Prometheus only", is_live=True),
    ),
}  # fmt: skip

DECLARED = tuple(metric for section in SECTIONS.values() for metric in section)


@cache
def _by_pattern() -> list[tuple[re.Pattern[str], Metric]]:
    """Those without labels first: a plain name is no label's value."""
    ordered = sorted(DECLARED, key=lambda metric: len(metric.labels))
    return [(metric.pattern, metric) for metric in ordered]


def declaration_of(name: str) -> Metric | None:
    """Which metric a reported name belongs to; None if it was never declared."""
    return next((metric for pattern, metric in _by_pattern() if pattern.fullmatch(name)), None)
