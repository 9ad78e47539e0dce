"""`rollway simulate`: how a run would go, under a virtual clock."""

import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from ..config.load import load
from ..config.plan import plan
from ..launch.run import orchestrator_spec
from ..orchestrator.core.core import Core
from ..orchestrator.shell.limits import limits
from ..records.ids import Step
from ..records.restored import StartPoint
from ..rundir.rundir import RunDir
from ..simulate.durations import from_config, from_run, measured_step_s
from ..simulate.report import report
from ..simulate.world import SimulatedWorld

ENDLESS = 10**9
"""Steps: the run is watched in the middle, not at its end."""


def simulate(
    run_file: Annotated[Path, typer.Argument(help="Run file (TOML).")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override a key: --set orchestrator.max_in_flight=512 (repeatable)."),
    ] = None,
    past: Annotated[
        Path | None, typer.Option("--from", help="Take durations from this past run (outputs/<name>).")
    ] = None,
    rollouts: Annotated[int, typer.Option(min=1, help="Stop after so many.")] = 100_000,
) -> None:
    """Simulate a run: the same decisions, with durations in place of engine, environments and trainer.

    Durations come from [simulate] in the run file, or from a past run. Shows throughput, who is idle,
    staleness, memory, and which knob holds the run back.
    """
    config = load(run_file, overrides or [])
    planned = plan(config)
    run = RunDir(past) if past else None
    durations = from_run(run) if run else from_config(config.simulate, config.seed)
    slots = planned.worker_slots or config.orchestrator.max_in_flight
    slots = slots if config.engine.urls else min(slots, config.engine.max_batch)
    ratios = {env.id: env.ratio for env in config.env}
    nowhere = dict.fromkeys(ratios, "")
    start = StartPoint(Step(1), "", "")
    part = orchestrator_spec(config, planned, RunDir(planned.run_dir), start, (), nowhere)
    endless = msgspec.structs.replace(limits(part), max_steps=ENDLESS)
    core = Core(endless, ratios, Step(1), {})
    started_s = time.monotonic()
    wants = config.orchestrator
    ticks = wants.adapt_in_flight or wants.rollouts_a_minute > 0 or wants.stragglers_after < 1
    tally = SimulatedWorld(core, durations, slots, config.seed, ticks=ticks).run(rollouts)
    for line in report(tally, slots, planned, measured_step_s(run) if run else 0.0):
        typer.echo(line)
    typer.echo(f"simulated in {time.monotonic() - started_s:.1f} s")
