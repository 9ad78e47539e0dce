"""The protocol that every engine dialect implements, and the prompt that a dialect sends."""

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
from msgspec import Struct

from ...records.turn import Ints, Routes, Sampling
from ..http.framing import Bytes
from ..replies.body import Bulks, BulkString
from ..replies.columns import ReplyColumns
from ..replies.routes import WantedRoutes
from .status import LoadGauges

Texts = Sequence[Sequence[int]]


class Prompt(Struct, frozen=True):
    """Token ids, and the same ids as JSON without brackets. A longer prompt encodes only its new ids."""

    ids: Ints
    text: bytes

    def __len__(self) -> int:
        return len(self.ids)


EMPTY_PROMPT = Prompt(np.zeros(0, np.int32), b"")


def make_prompt(ids: Ints, previous: Prompt = EMPTY_PROMPT) -> Prompt:
    """Return a prompt of these ids. If they start with `previous`, only the new ids are encoded."""
    shared = len(previous) if np.array_equal(ids[: len(previous)], previous.ids) else 0
    new = msgspec.json.encode(ids[shared:].tolist())[1:-1]
    texts = [previous.text, new] if shared else [new]
    return Prompt(ids, b",".join(filter(None, texts)))


class EngineCall(Struct, frozen=True):
    path: str
    body: bytes = b""


class WeightUpdate(Struct, frozen=True):
    """The calls that load new weights: stop decoding, load, continue. `label` tells the engine the
    version of these weights, once they were found to be right."""

    pause: EngineCall
    load: tuple[EngineCall, ...]
    resume: EngineCall
    label: EngineCall


class ProbeAnswer(Struct, frozen=True):
    """What an engine says of one text: the logprobs of its tokens but the first, the logprob of the most
    likely next token, and the experts of each token."""

    logprobs: tuple[float, ...]
    top_logprob: float
    routes: Routes | None = None


class Dialect(Protocol):
    """The requests that one kind of engine understands, and the shape of its replies."""

    name: str
    path: str
    """The path that completions are requested at."""
    weight_version: EngineCall
    """Asks which version the engine samples from."""
    gauges: LoadGauges
    """The names of the engine's metrics that describe its load."""

    def encode_request(
        self,
        model: str,
        prompt: Prompt,
        sampling: Sampling,
        stop_ids: list[int],
        start: int | None,
        salt: str = "",
    ) -> bytes:
        """Return the body of a request. It asks for routes from position `start`, or for none. Requests
        with different salts share no cached prefix."""

    def encode_probe(self, model: str, texts: Texts, *, reads_cache: bool = False) -> bytes:
        """Return the body of a request for the logprobs of texts. If it may read the engine's prefix
        cache, it asks only for the most likely next tokens."""

    def parse_probe(self, body: Bytes) -> list[ProbeAnswer]:
        """Return the answers to such a request, in the order of the texts."""

    def unneeded_chars(self, key: bytes, bulk: BulkString, wanted: WantedRoutes) -> int:
        """Return how many characters at the start of a bulk hold only positions that are not wanted."""

    def parse_columns(self, rest: Bytes) -> ReplyColumns:
        """Parse the JSON of a reply without its bulks."""

    def decode_routes(
        self, bulks: Bulks, wanted: WantedRoutes, num_drawn: int
    ) -> Routes | None:
        """Return the routes of the wanted positions, or None if the reply has none."""

    def weight_update(
        self, path: str, version: int, *, has_plugin: bool = False
    ) -> WeightUpdate:
        """Return the calls that load the weights of `version` from the folder `path`. With rollway's
        plug-in vLLM loads them exactly."""
