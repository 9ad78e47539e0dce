"""Says which extra is missing before anything is started."""

from importlib.util import find_spec

from ..config.sections import MetricsConfig
from ..errors import ConfigError


def need_torch(what: str) -> None:
    if find_spec("torch") is None or find_spec("transformers") is None:
        raise ConfigError(f"{what} needs torch and transformers: pip install 'rollway[local]'")


def need_sinks(config: MetricsConfig) -> None:
    if config.wandb_project:
        _need("wandb", f"'metrics.wandb_project' = {config.wandb_project!r}")
    if config.tensorboard:
        _need("tensorboard", "'metrics.tensorboard' = true")


def _need(package: str, what: str) -> None:
    found = find_spec(package)
    if found is None or found.origin is None:  # a folder of that name is no package
        raise ConfigError(f"{what} needs the package {package}: pip install 'rollway[{package}]'")
