"""`rollway simulate`: predicts how a run would go, under a virtual clock."""

import time
from pathlib import Path
from typing import Annotated

import msgspec
from typer import Option, echo

from ..config.load import load
from ..config.plan import core_spec, plan
from ..config.sections import RunConfig
from ..orchestrator.core.core import Core
from ..records.ids import Step
from ..rundir.rundir import RunDir
from ..simulate.durations import MeanDurations, around_means, from_run, measured_step_s
from ..simulate.report import report
from ..simulate.world import SimulatedWorld
from .checks import Overrides, RunFile

ENDLESS = 10**9
"""More steps than are simulated, so that the end of the run does not distort the figures."""
MEANS = MeanDurations()

Turns = Annotated[float, Option(min=0.1, help="Turns of a rollout.")]
TurnS = Annotated[float, Option(min=0.001, help="Seconds the engine takes for one turn.")]
ToolS = Annotated[float, Option(min=0, help="Seconds the environment takes after each turn.")]
ScoringS = Annotated[float, Option(min=0, help="Seconds the rewards take.")]
TrainS = Annotated[
    float, Option(min=0.001, help="Seconds from a shipped batch to its weights.")
]
UpdateS = Annotated[float, Option(min=0, help="Seconds the engine takes to load weights.")]
Spread = Annotated[
    float,
    Option(min=0, help="How much durations vary: standard deviation of their logarithm."),
]
RolloutBytes = Annotated[int, Option(min=0, help="Payload of a rollout.")]
RolloutTokens = Annotated[int, Option(min=1, help="Tokens of a rollout, prompts included.")]
FailureRate = Annotated[float, Option(min=0, max=1, help="Share of the rollouts that fail.")]


def simulate(
    run_file: RunFile,
    overrides: Overrides = None,
    past: Annotated[
        Path | None,
        Option(
            "--from",
            help="Use the durations of this past run, outputs/<name>, instead of the options below.",
        ),
    ] = None,
    rollouts: Annotated[int, Option(min=1, help="Stop after this many rollouts.")] = 100_000,
    turns: Turns = MEANS.turns,
    turn_s: TurnS = MEANS.turn_s,
    tool_s: ToolS = MEANS.tool_s,
    scoring_s: ScoringS = MEANS.scoring_s,
    train_s: TrainS = MEANS.train_s,
    update_s: UpdateS = MEANS.update_s,
    spread: Spread = MEANS.spread,
    rollout_bytes: RolloutBytes = MEANS.rollout_bytes,
    rollout_tokens: RolloutTokens = MEANS.rollout_tokens,
    failure_rate: FailureRate = MEANS.failure_rate,
) -> None:
    """Simulate a run: the orchestrator's real decisions, with durations in place of all other work.

    Durations come from a past run (--from), or are drawn around the means that you give. The report
    shows throughput, idle time, staleness, memory, and which setting limits the run.
    """
    means = MeanDurations(
        turns=turns,
        turn_s=turn_s,
        tool_s=tool_s,
        scoring_s=scoring_s,
        train_s=train_s,
        update_s=update_s,
        spread=spread,
        rollout_bytes=rollout_bytes,
        rollout_tokens=rollout_tokens,
        failure_rate=failure_rate,
    )
    run = RunDir(past) if past else None
    for line in _simulate(load(run_file, overrides or ()), means, run, rollouts):
        echo(line)


def _simulate(
    config: RunConfig, means: MeanDurations, past: RunDir | None, num_rollouts: int
) -> list[str]:
    planned, settings, engine = plan(config), config.orchestrator, config.engine
    durations = from_run(past) if past else around_means(means, config.seed)
    slots = planned.worker_slots or settings.max_in_flight
    if engine.is_embedded:
        slots = min(slots, engine.local.max_batch)
    endless = msgspec.structs.replace(core_spec(config, planned), max_steps=ENDLESS)
    core = Core(endless, Step(1), {})
    started_s = time.monotonic()
    needs_ticks = (
        settings.adapt_in_flight or settings.rollouts_a_minute or settings.stragglers_after
    )
    world = SimulatedWorld(core, durations, slots, config.seed, ticks=bool(needs_ticks))
    tally = world.run(num_rollouts)
    lines = report(tally, slots, planned, measured_step_s(past) if past else 0.0)
    return [*lines, f"simulated in {time.monotonic() - started_s:.1f} s"]
