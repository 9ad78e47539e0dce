"""Knows which version of the weights drew which token of the requests that vLLM is answering."""

import uuid
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray


class Loaded(Struct, frozen=True):
    """What a worker returns when it has loaded a version: the version, and how many tokens it had drawn
    by then for each request, by vLLM's name for the request. None if it does not know."""

    version: str
    drawn: dict[str, int] | None


class _Results(Struct, frozen=True):
    results: list[Loaded]


_results = msgspec.json.Decoder(_Results)


class TokenVersions:
    """Requests that are in flight while weights are loaded continue, so that several versions may draw
    one reply. As long as no worker has loaded a version, the versions are not known."""

    def __init__(self) -> None:
        self._current: int | None = None
        self._live: dict[str, list[tuple[int, int]]] = {}
        """The requests under way, and for each version the number of its first token."""

    def begin(self) -> str:
        """Return a name for a new request, which vLLM must be given."""
        name = uuid.uuid4().hex
        self._live[name] = [] if self._current is None else [(0, self._current)]
        return name

    def note_load(self, body: bytes | bytearray) -> None:
        """Read the answer of `/collective_rpc`. It may also be that of another call than a load."""
        try:
            loaded = _results.decode(body).results[0]
            version = int(loaded.version)
        except (msgspec.DecodeError, ValueError, IndexError):
            return
        self._current = version
        if loaded.drawn is None:
            self._live = {name: [] for name in self._live}
            return
        drawn = _by_own_name(loaded.drawn)
        for name, starts in self._live.items():
            starts.append((drawn.get(name, 0), version))

    def end(self, name: str, num_tokens: int) -> NDArray[Any] | None:
        """Return the version of each token of a reply. None if they are not known."""
        starts = self._live.get(name)
        if not starts or starts[0][0] > 0:
            return None
        versions = np.empty(num_tokens, np.int32)
        for first, version in starts:
            versions[first:] = version
        return versions

    def forget(self, name: str) -> None:
        self._live.pop(name, None)


def _by_own_name(drawn: Mapping[str, int]) -> dict[str, int]:
    """vLLM adds a suffix to the name of a request, behind a dash."""
    return {key.partition("-")[0]: count for key, count in drawn.items()}
