"""Checks a model folder without loading it."""

import json
from pathlib import Path

from ..errors import ModelError


def check_folder(folder: str) -> None:
    """Raise ModelError if this cannot be a model folder."""
    path = Path(folder)
    if not path.is_dir():
        raise ModelError(f"no model folder '{folder}' (model.path)")
    try:
        json.loads((path / "config.json").read_text())
    except OSError as error:
        raise ModelError(f"cannot read model '{folder}': {error}") from None
    except ValueError as error:
        raise ModelError(f"{path / 'config.json'} is not JSON: {error}") from None
