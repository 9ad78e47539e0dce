"""`rollway keys`: keys for env servers and runs that other machines can reach."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Typer, echo

from ..wire.keys import make_keys, read_public_keys

app = Typer(
    name="keys",
    help="Make and show keys (CURVE), which decide who may connect to an env server or a run.",
    no_args_is_help=True,
)


@app.command()
def new(
    folder: Annotated[
        Path, Argument(help="The folder to write. Existing keys are never overwritten.")
    ] = Path("keys"),
) -> None:
    """Make a key pair for a server and one for its client: FOLDER/server and FOLDER/client.

    Each machine gets only its own folder. The server is started with 'rollway serve --keys
    FOLDER/server'. The run file on the other machine has 'keys = "FOLDER/client"' beside the server's
    address. If the trainer is on another machine, [transport.zmq] of the run names FOLDER/server and the
    trainer uses FOLDER/client. Copy FOLDER/client with scp, and then delete it here.

    To admit one more client, make keys for it with 'rollway keys new other'. 'rollway keys show' prints
    public keys: write that of other/client into FOLDER/server/clients/other.public, and that of the
    server into other/client/server.public. Then restart the server. To shut a client out, delete its
    file in FOLDER/server/clients and restart the server.
    """
    server, client = make_keys(folder)
    echo(f"{server}: for the server, 'rollway serve … --keys {server}'")
    echo(
        f"{client}: for the client, 'keys = \"{client}\"' in its run file, beside the address"
    )


@app.command()
def show(
    folder: Annotated[
        Path, Argument(help="The folder of a server, of a client, or of both.")
    ],
) -> None:
    """Print the public keys in a folder. Secret keys are never printed."""
    for owner, key in read_public_keys(folder).items():
        echo(f"{key}  {owner}")
