"""Every metric that rollway reports: its name, unit and meaning are declared here and nowhere else.

To add a metric, declare it below in its section, report it under that name, and run `make docs`.
`metrics.jsonl`, Prometheus, W&B, TensorBoard and docs/metrics.md follow from the declaration.
"""

import re

from msgspec import Struct

LABEL = re.compile(r"\{(\w+)\}")


class Metric(Struct, frozen=True):
    """A declaration. A word in braces stands for the name of a reward, a process and so on, and is a
    label in Prometheus."""

    name: str
    unit: str
    meaning: str
    is_live: bool = False
    """Prometheus gets it once a second, not only once a step."""
    is_summed: bool = False
    """Prometheus gets the sum since the start of the run; `metrics.jsonl` has the value of one step."""
    is_exported: bool = True
    """Prometheus gets it. False if another metric gives Prometheus the same."""

    @property
    def labels(self) -> list[str]:
        return LABEL.findall(self.name)

    @property
    def pattern(self) -> re.Pattern[str]:
        """A pattern that matches the names reported for this metric, with a group for each label."""
        return re.compile(LABEL.sub(r"(?P<\1>[^/]+)", self.name))


SECTIONS: dict[str, tuple[Metric, ...]] = {
    "Rewards": (
        Metric("reward/all/mean", "reward", "mean reward of all rollouts scored for this step"),
        Metric("reward/all/std", "reward", "standard deviation of these rewards"),
        Metric("reward/{reward}/mean", "reward", "mean of one reward function, before its weight"),
        Metric("metric/{metric}/mean", "", "mean of one metric function of an environment"),
        Metric("solve_rate", "fraction", "rollouts that are right: reward of `correct_at` or more"),
        Metric("solve_all", "fraction", "groups in which every rollout is right"),
        Metric("solve_none", "fraction", "groups in which no rollout is right"),
    ),
    "By environment": (
        Metric("env/{env}/reward/mean", "reward", "mean reward of the environment's rollouts"),
        Metric("env/{env}/solve_rate", "fraction", "rollouts of the environment that are right"),
        Metric("env/{env}/completion_len/mean", "tokens", "mean number of tokens sampled in a rollout"),
        Metric("env/{env}/num_turns/mean", "turns", "mean number of turns of a rollout"),
        Metric("env/{env}/truncated", "fraction", "rollouts whose last turn reached its token limit"),
        Metric("env/{env}/rollouts", "rollouts", "rollouts of the environment that were scored"),
        Metric("env/{env}/errors", "rollouts", "rollouts of the environment that failed"),
    ),
    "Lengths and ends": (
        Metric("seq_len/mean", "tokens", "mean number of tokens of a rollout, prompts included"),
        Metric("seq_len/max", "tokens", "number of tokens of the longest rollout, prompts included"),
        Metric("completion_len/mean", "tokens", "mean number of tokens sampled in a rollout"),
        Metric("completion_len/max", "tokens", "largest number of tokens sampled in a rollout"),
        Metric("num_turns/mean", "turns", "mean number of turns of a rollout"),
        Metric("num_turns/max", "turns", "largest number of turns of a rollout"),
        Metric("truncated", "fraction", "rollouts whose last turn reached its token limit"),
        Metric("stop/{condition}", "fraction", "rollouts by what ended them: the name of a stop "
               "condition, `max_turns`, `max_rollout_tokens`, `context` if the next prompt did not fit "
               "the engine's window, or how the last turn ended (`stop`, `length`)"),
        Metric("scored/rollouts", "rollouts", "rollouts scored for this step, trained on or not"),
        Metric("scored/tokens", "tokens", "tokens sampled in these rollouts"),
    ),
    "Filters and staleness": (
        Metric("filters/zero_advantage", "fraction", "groups left out because all their rewards are "
               "equal"),
        Metric("filters/{sign}", "fraction", "rollouts whose text shows `gibberish` or `repetition`"),
        Metric("filters/left_out", "rollouts", "rollouts of trained groups that a filter left out"),
        Metric("filters/filtered", "groups", "groups left out because a filter left out every rollout"),
        Metric("filters/too_few", "groups", "groups left out because fewer than two rollouts were "
               "scored"),
        Metric("filters/stale", "groups", "groups left out because they were too old"),
        Metric("off_policy/mean", "versions", "mean staleness of the rollouts trained on"),
        Metric("off_policy/max", "versions", "largest staleness of the rollouts trained on"),
    ),
    "Failures": (
        Metric("errors/{boundary}", "rollouts", "rollouts that failed, by the part that failed: env, "
               "engine, scorer, deadline, worker"),
        Metric("errors/cancelled", "rollouts", "rollouts that were cancelled"),
    ),
    "The batch": (
        Metric("step", "step", "number of the optimizer step, from 1"),
        Metric("time", "s", "when the step was reported, in seconds since 1970", is_exported=False),
        Metric("batch/rollouts", "rollouts", "rollouts trained on in this step"),
        Metric("batch/rows", "rows", "rows trained on in this step"),
        Metric("batch/approximate_rows", "rows",
               "of these, rows whose token ids or logprobs the endpoint did not give"),
        Metric("batch/tokens", "tokens", "tokens of these rows"),
        Metric("batch/micro_batches", "", "forward passes of this step, on all ranks together"),
        Metric("throughput/tokens", "tokens/s", "tokens sampled in scored rollouts, per second of this "
               "step"),
        Metric("throughput/rollouts", "rollouts/s", "rollouts scored, per second of this step"),
        Metric("in_flight", "rollouts", "rollouts that were running when the step ended", is_live=True),
        Metric("ready", "rollouts", "rollouts that wait for the rest of their batch", is_live=True),
        Metric("payload/live_bytes", "bytes", "payload that is written and not yet trained",
               is_live=True),
        Metric("payload/held_back", "", "1 while the payload budget keeps rollouts from starting, else "
               "0", is_live=True),
        Metric("max_in_flight", "rollouts", "how many rollouts may run at a time; changes if "
               "`adapt_in_flight` is on"),
        Metric("retries", "rollouts", "failed rollouts that were run again, since the start of the run"),
        Metric("pool/{env}/{pool}", "tasks", "tasks of an environment that count as `easy` or as "
               "`hard`"),
    ),
    "Evaluations, in `evals.jsonl`": (
        Metric("eval/{env}/avg@{k}", "reward", "mean reward, with k rollouts of each task"),
        Metric("eval/{env}/pass@{k}", "fraction", "tasks that at least one of k rollouts gets right "
               "(unbiased estimate)"),
        Metric("eval/{env}/completion_len/mean", "tokens", "mean number of tokens sampled in a rollout"),
        Metric("eval/{env}/truncated", "fraction", "rollouts whose last turn reached its token limit"),
        Metric("eval/{env}/failed", "fraction", "rollouts that failed or were cancelled; the means "
               "leave them out"),
        Metric("eval/{env}/tasks", "tasks", "tasks with at least one scored rollout"),
        Metric("eval/{env}/version/min", "version", "oldest weights that sampled in a rollout: the "
               "version that is evaluated"),
        Metric("eval/{env}/version/max", "version", "newest weights that sampled in a rollout; larger "
               "if weights changed during the evaluation"),
    ),
    "The optimizer": (
        Metric("loss", "", "policy-gradient loss"),
        Metric("grad_norm", "", "norm of the gradient before clipping"),
        Metric("clip_fraction", "fraction", "trainable tokens whose importance ratio was clipped"),
        Metric("ratio/mean", "", "mean importance ratio of trainer to engine"),
        Metric("ratio/limited", "fraction", "trainable tokens whose ratio was so large or small that it "
               "was limited to e^20 or e^-20"),
        Metric("rows/left_out", "rows", "rows that the trainer could not use and left out"),
        Metric("mismatch_kl", "nats", "estimated KL divergence of the engine from the trainer"),
        Metric("fresh_kl/{engine}", "nats", "the same for rows that one engine drew from the version "
               "that is trained: only rounding is left"),
        Metric("entropy", "nats", "mean entropy of the trainer's distribution on the tokens trained on"),
        Metric("lr", "", "learning rate"),
    ),
    "Where a rollout's time goes": (
        Metric("timing/{phase}/mean", "s", "mean time of a rollout in each phase: `queue` (sent to the "
               "env server, not yet in a worker), then `engine`, `env`, `scoring`, and `total`, the "
               "whole time in the worker. `engine` adds up requests that ran at the same time"),
        Metric("timing/{phase}/max", "s", "longest time of a rollout in each phase"),
    ),
    "Where a step's time goes": (
        Metric("time/step", "s", "from the publication of the previous version to that of this one"),
        Metric("time/wait_rollouts", "s", "from the shipping of the previous batch until this batch "
               "was complete"),
        Metric("time/hold", "s", "how long the complete batch was held back until the trainer had "
               "caught up"),
        Metric("time/credit", "s", "how long groups waited for your advantage function"),
        Metric("time/ship", "s", "from the decision to ship the batch until its manifest was written"),
        Metric("time/open", "s", "from the written manifest until the trainer opened it"),
        Metric("time/train", "s", "forward passes, backward passes and the optimizer's update"),
        Metric("time/publish", "s", "writing the weights, and the checkpoint if one was due"),
        Metric("time/update_weights", "s", "the engine's last loading of weights that ended in this "
               "step"),
        Metric("time/verify", "s", "the part of it in which an engine was asked whether it has them"),
    ),
    "Processes": (
        Metric("event_loop_lag/{stat}", "s", "how late the orchestrator's event loop runs: min, mean, "
               "med, p90, p99, max", is_exported=False),
        Metric("event_loop_lag/{process}/{stat}", "s", "how late the event loop of a process runs",
               is_live=True),
        Metric("stalls/{process}/count", "", "how often the event loop of a process was held longer "
               "than `watch.stall_ms`", is_live=True, is_summed=True),
        Metric("stalls/{process}/seconds", "s", "how long the event loop was held in all these stalls",
               is_live=True, is_summed=True),
        Metric("late/{process}/{cause}", "s", "how long the event loop of a process was late because of "
               "`code` that ran in it, another `thread` that kept the GIL, the garbage `collector`, a "
               "`core` that was not free, or `memory` that was read from a disk",
               is_live=True, is_summed=True),
        Metric("slow_calls/{process}/count", "", "how many calls in the lanes of a process took longer "
               "than `watch.stall_ms`", is_live=True, is_summed=True),
        Metric("slow_calls/{process}/seconds", "s", "how long all these slow calls took",
               is_live=True, is_summed=True),
        Metric("rss/{process}", "bytes", "resident memory of a process", is_live=True),
        Metric("process_in_flight/{process}", "rollouts", "rollouts that a process is working on; only "
               "in Prometheus", is_live=True),
    ),
}  # fmt: skip

DECLARED = tuple(metric for section in SECTIONS.values() for metric in section)
"""All metrics. Where a reported name fits several, the one with the fewest labels is meant."""
