"""`rollway doctor`: says what an engine can do, and whether training on it would be right."""

import os
from typing import Annotated

from typer import Exit, Option, echo

from ..config.credentials import without_credentials
from ..config.specs import WatchSpec
from ..inference.doctor.examine import examine
from ..inference.doctor.finding import Finding
from ..inference.engines.link import EngineAccess
from ..loop.watch.run import run
from ..model.hub import find_folder
from ..model.shape import ModelShape, read_shape
from ..records.probe import Probe
from ..records.text import visible
from .checks import TrustRemoteCode, need_torch

DEADLINE_S = 60.0
MARKS = {"ok": "ok   ", "note": "note ", "wrong": "WRONG"}


def doctor(
    engine_url: Annotated[
        str, Option(help="The engine to examine, such as http://localhost:8000.")
    ],
    model: Annotated[
        str,
        Option(
            "--model",
            "-m",
            help="The model that it should serve: a folder, or a name on the Hugging Face hub. With it "
            "weights and routes are compared, too.",
        ),
    ] = "",
    name: Annotated[
        str,
        Option(help="The engine's name for the model; without it the first that it lists."),
    ] = "",
    key_var: Annotated[
        str, Option(help="The environment variable that holds the engine's API key.")
    ] = "",
    intrusive: Annotated[
        bool,
        Option("--intrusive", help="Also pause the engine and load its weights once more."),
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Examine an engine before you train on it: one line for each thing that training needs.

    Nothing changes on the server unless you give --intrusive. The exit code is 1 if training on this
    engine would be wrong.
    """
    shape, probe = None, None
    if model:
        need_torch("--model")
        folder = find_folder(model, trusts_code=trust_remote_code)
        shape, probe = read_shape(folder), make_probe(folder, trusts_code=trust_remote_code)
    engine_url = without_credentials(engine_url)
    access = EngineAccess(engine_url, DEADLINE_S, name, os.environ.get(key_var, ""))
    found = run(
        "rollway-doctor",
        WatchSpec(),
        lambda _: _examine(access, shape, probe, intrusive=intrusive),
    )
    num_wrong = sum(finding.verdict == "wrong" for finding in found)
    if num_wrong:
        echo(
            f"Training on this engine would be wrong: {num_wrong} of {len(found)} lines say why"
        )
        raise Exit(1)
    echo("Training on this engine is right, as far as can be seen from outside")


async def _examine(
    access: EngineAccess, shape: ModelShape | None, probe: Probe | None, *, intrusive: bool
) -> list[Finding]:
    found = []
    async for finding in examine(access, shape, probe, intrusive=intrusive):
        echo(visible(f"{MARKS[finding.verdict]} {finding.subject}: {finding.text}"))
        found.append(finding)
    return found


def make_probe(folder: str, *, trusts_code: bool) -> Probe:
    """Return what the weights in a folder say of a few texts. Loads the model."""
    from ..model.load import load_model
    from ..model.packing import RowModel
    from ..model.routers import find_routers
    from ..records.ids import PolicyVersion
    from ..trainer.probes import ProbeMaker

    loaded = load_model(folder, trusts_code=trusts_code).eval()
    rows = RowModel(loaded, find_routers(loaded), "single")
    maker = ProbeMaker(rows, "float32", has_cached_text=False)
    return maker.make(PolicyVersion(0))
