"""Lists the tensors of a folder with weights, without reading them. Needs no torch."""

import json
import struct
from pathlib import Path

from ..errors import ModelError

MAX_HEADER_BYTES = 100 << 20


def tensor_names(folder: Path) -> frozenset[str]:
    """Return the names of all tensors in the safetensors files of a folder. Blocks."""
    names: set[str] = set()
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                if length > MAX_HEADER_BYTES:
                    raise ValueError(f"its header has {length} bytes")
                names |= json.loads(file.read(length)).keys()
        except (OSError, struct.error, ValueError) as error:
            raise ModelError(f"{path} is not a complete safetensors file: {error}") from None
    names.discard("__metadata__")
    return frozenset(names)


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
