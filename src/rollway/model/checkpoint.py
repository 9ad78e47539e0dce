"""Lists the tensors of a folder with weights, without reading them. Needs no torch."""

import json
import struct
from pathlib import Path
from typing import Any

from ..errors import ModelError

MAX_HEADER_BYTES = 100 << 20


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return what a safetensors file says of its tensors, and the byte at which their data starts."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"its header has {length} bytes")
        return json.loads(file.read(length)), 8 + length


def tensor_names(folder: Path) -> frozenset[str]:
    """Return the names of all tensors in the safetensors files of a folder. Blocks."""
    names: set[str] = set()
    for path in sorted(folder.glob("*.safetensors")):
        try:
            names |= _read_header(path)[0].keys()
        except (OSError, struct.error, ValueError) as error:
            raise ModelError(f"{path} is not a complete safetensors file: {error}") from None
    names.discard("__metadata__")
    return frozenset(names)


def check_whole(folder: Path) -> None:
    """Raise ModelError unless every weight file of a folder has all bytes that its header promises, and
    config.json can be read. Blocks. Weights that only engines can read are not checked."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            tensors, start = _read_header(path)
            tensors.pop("__metadata__", None)
            ends = [tensor["data_offsets"][1] for tensor in tensors.values()]
            if not ends or path.stat().st_size < start + max(ends):
                raise ValueError("bytes of its tensors are missing")
        except (OSError, struct.error, ValueError, KeyError, TypeError) as error:
            raise ModelError(
                f"{path} is not a complete safetensors file: {error}; copy or download it again"
            ) from None
    config = folder / "config.json"
    try:
        if config.exists():
            json.loads(config.read_text())
    except ValueError as error:
        raise ModelError(f"{config} is not complete: {error}") from None


def check_complete(folder: Path, expected: frozenset[str]) -> frozenset[str]:
    """Return the names of a version's tensors. Raise ModelError if one of `expected` is missing: engines
    would keep its old values without a word. Weights that only engines can see are taken to be whole."""
    names = tensor_names(folder)
    if not names:
        return expected
    if missing := sorted(expected - names):
        raise ModelError(
            f"the weights in '{folder}' lack {len(missing)} tensors that earlier versions had, such as "
            f"'{missing[0]}': engines would keep old values for them"
        )
    return names
