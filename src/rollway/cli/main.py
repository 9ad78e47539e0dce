"""Parses the command line. An error that the user can fix is printed as one line, no traceback."""

import os
import sys
from collections.abc import Sequence

import typer

from ..errors import RollwayError
from ..loop.processes.child import OWNER_ONLY, raise_file_limit
from ..loop.processes.part import first_cause
from ..records.text import visible
from . import (
    doctor,
    engine,
    envs,
    evaluate,
    init,
    keys,
    payload,
    serve,
    show,
    simulate,
    train,
    why,
)
from .stopping import INTERRUPTED

app = typer.Typer(
    name="rollway",
    help="Train and evaluate language models with asynchronous reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # in rich's markup, [transport.zmq] in a help text would disappear
)
app.command()(train.train)
app.command("eval")(evaluate.evaluate)
app.command()(why.why)
app.command()(show.show)
app.command()(simulate.simulate)
app.command()(envs.envs)
app.command()(init.init)
app.command()(doctor.doctor)
app.command()(engine.engine)
app.command()(serve.serve)
app.add_typer(keys.app)
app.add_typer(payload.app)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line, or `args` if they are given. Always ends with SystemExit."""
    os.umask(OWNER_ONLY)
    raise_file_limit()
    if "" not in sys.path:
        sys.path.insert(0, "")  # find modules in the current folder, as `python -m` does
    try:
        app(args)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except (RollwayError, BaseExceptionGroup) as error:
        cause = first_cause(error)
        if not isinstance(cause, RollwayError):
            raise
        print(f"rollway: {visible(str(cause))}", file=sys.stderr)
        sys.exit(1)
