"""Parses the command line. An error that the user can fix is printed as one line, no traceback."""

import os
import pkgutil
import sys
from collections.abc import Iterable, Sequence

import typer

from ..errors import RollwayError
from ..loop.processes.child import OWNER_ONLY, raise_file_limit
from .stopping import INTERRUPTED, explain

COMMANDS = {
    "train": "train:train",
    "eval": "evaluate:evaluate",
    "why": "why:why",
    "show": "show:show",
    "simulate": "simulate:simulate",
    "envs": "envs:envs",
    "init": "init:init",
    "doctor": "doctor:doctor",
    "engine": "engine:engine",
    "serve": "serve:serve",
    "keys": "keys:app",
    "payload": "payload:app",
}
"""Where each command is. Only what is typed is imported: all of them together take half a second."""


def make_app(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """Return the command line with these commands."""
    app = typer.Typer(
        name="rollway",
        help="Train and evaluate language models with asynchronous reinforcement learning.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # in rich's markup, [transport.zmq] in a help text would disappear
    )
    app.callback()(lambda: None)  # or typer would drop the name of a command that is alone
    for name in names:
        command = pkgutil.resolve_name(f"{__package__}.{COMMANDS[name]}")
        if isinstance(command, typer.Typer):
            app.add_typer(command)
        else:
            app.command(name)(command)
    return app


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line, or `args` if they are given. Always ends with SystemExit."""
    os.umask(OWNER_ONLY)
    raise_file_limit()
    if "" not in sys.path:
        sys.path.insert(0, "")  # find modules in the current folder, as `python -m` does
    words = sys.argv[1:] if args is None else args
    typed = [word for word in words[:1] if word in COMMANDS]
    try:
        make_app(typed or COMMANDS)(args)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except (RollwayError, OSError, BaseExceptionGroup) as error:
        text = explain(error)
        if text is None:
            raise
        print(f"rollway: {text}", file=sys.stderr)
        sys.exit(1)
