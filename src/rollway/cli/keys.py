"""`rollway keys`: keys for env servers, and runs, that other machines can reach."""

from pathlib import Path
from typing import Annotated

import typer

from ..wire.keys import make_keys, read_public_keys

app = typer.Typer(
    name="keys",
    help="Keys (CURVE) for env servers: who may connect, and to whom.",
    no_args_is_help=True,
)


@app.command()
def new(
    folder: Annotated[Path, typer.Argument(help="Folder to make; keys are never overwritten.")] = Path(
        "keys"
    ),
) -> None:
    """Make a key pair for a server and one for its client: FOLDER/server and FOLDER/client.

    Each side gets its own folder and nothing else: 'rollway serve --keys FOLDER/server' on one machine,
    'keys = "FOLDER/client"' in the env section of the other's run file. With a trainer on another
    machine the run's [transport] section names FOLDER/server, and the trainer FOLDER/client. Move
    FOLDER/client over a safe way (scp), and remove it where it is not needed.

    To let in one more client: make a pair for it ('rollway keys new other'), write the public key of
    other/client ('rollway keys show') into FOLDER/server/clients/other.public and the server's into
    other/client/server.public, and restart the server. Removing such a file shuts its client out.
    """
    server, client = make_keys(folder)
    typer.echo(f"{server}: for the server, 'rollway serve … --keys {server}'")
    typer.echo(f"{client}: for whoever connects, 'keys = \"{client}\"' below [[env]] in a run file")


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(help="Folder of a server, of a client, or of both.")],
) -> None:
    """Print the public keys a folder knows. Secrets are never printed."""
    for what, key in read_public_keys(folder).items():
        typer.echo(f"{key}  {what}")
