"""Parses the command line; errors that users can mend are one line, without a traceback."""

import sys
from collections.abc import Sequence

import typer

from ..errors import RollwayError
from ..loop.processes.part import first_cause
from . import engine, envs, evaluate, init, keys, payload, serve, show, simulate, train, why
from .stopping import INTERRUPTED

app = typer.Typer(
    name="rollway",
    help="The rollout plane of asynchronous RL for language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(train.train)
app.command("eval")(evaluate.evaluate)
app.command()(why.why)
app.command()(show.show)
app.command()(simulate.simulate)
app.command()(envs.envs)
app.command()(init.init)
app.command()(engine.engine)
app.command()(serve.serve)
app.add_typer(keys.app)
app.add_typer(payload.app)


def main(args: Sequence[str] | None = None) -> None:
    """What the command line says unless `args` are given. Always ends by SystemExit."""
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` has it: modules of the folder one is in are found
    try:
        app(args)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except (RollwayError, BaseExceptionGroup) as error:
        cause = first_cause(error)
        if not isinstance(cause, RollwayError):
            raise
        print(f"rollway: {cause}", file=sys.stderr)
        sys.exit(1)
