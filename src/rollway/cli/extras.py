"""Says which extra is missing before anything is started."""

from importlib.util import find_spec

from ..errors import ConfigError


def need_torch(what: str) -> None:
    if find_spec("torch") is None or find_spec("transformers") is None:
        raise ConfigError(f"{what} needs torch and transformers: pip install 'rollway[local]'")
