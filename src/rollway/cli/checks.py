"""Options that several commands share, and checks of options and of installed packages."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Struct
from typer import Argument, Option

from ..config.credentials import hide_credentials
from ..config.load import in_words
from ..config.sections import MetricsConfig
from ..errors import UNREADABLE, ConfigError

S = TypeVar("S", bound=Struct)

RunFile = Annotated[Path, Argument(help="The run file (TOML).")]
Overrides = Annotated[
    list[str] | None,
    Option(
        "--set", help="Change a key of the run file: --set trainer.lr=1e-3. May be repeated."
    ),
]
Env = Annotated[
    str,
    Argument(help="The environment: a name of 'rollway envs', a module, or path/to/env.py."),
]
ARGS_HELP = """Arguments of the environment, as a JSON object: '{"level": "hard"}'."""
RENDERER_HELP = (
    "How messages become tokens: auto, default, or a family such as qwen3 (docs/models.md)."
)
TEMPLATE_HELP = """Options of the renderer, as JSON: '{"enable_thinking": false}'."""
Args = Annotated[str, Option(help=ARGS_HELP)]
RendererName = Annotated[str, Option(help=RENDERER_HELP)]
TrustRemoteCode = Annotated[
    bool,
    Option("--trust-remote-code", help="Run the Python code that comes with the model."),
]
Template = Annotated[str, Option(help=TEMPLATE_HELP)]


def json_object(option: str, text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except UNREADABLE as error:
        shown = hide_credentials(repr(text))
        raise ConfigError(f"{option} {shown} is not a JSON object: {error}") from None


def checked(config: S, **option_names: str) -> S:
    """Refuse what a run file would be refused for; `option_names` are those that differ from keys."""
    try:
        return msgspec.convert(msgspec.to_builtins(config), type(config))
    except msgspec.ValidationError as error:
        what, _, key = str(error).partition(" - at `$.")
        key = key.rstrip("`")
        option = option_names.get(key, key).replace("_", "-")
        shown = hide_credentials(str(getattr(config, key)))
        raise ConfigError(f"--{option} {shown}: {in_words(what)}") from None


def need_torch(purpose: str) -> None:
    if find_spec("torch") is None or find_spec("transformers") is None:
        raise ConfigError(
            f"{purpose} needs torch and transformers: pip install 'rollway[local]'"
        )


def need_sinks(config: MetricsConfig) -> None:
    if config.wandb_project:
        _need("wandb", f"'metrics.wandb_project' = {config.wandb_project!r}")
    if config.tensorboard:
        _need("tensorboard", "'metrics.tensorboard' = true")


def _need(package: str, setting: str) -> None:
    found = find_spec(package)
    # a plain folder of that name counts as found too, but has no origin
    if found is None or found.origin is None:
        raise ConfigError(
            f"{setting} needs the package {package}: pip install 'rollway[{package}]'"
        )
