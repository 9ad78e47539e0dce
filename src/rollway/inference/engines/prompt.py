"""A prompt: token ids, and the same ids as JSON."""

import msgspec
import numpy as np
from msgspec import Struct

from ...records.turn import Ints


class Prompt(Struct, frozen=True):
    """`text` is the ids' JSON without brackets, so that a longer prompt costs only its new ids."""

    ids: Ints
    text: bytes

    def __len__(self) -> int:
        return len(self.ids)


NO_PROMPT = Prompt(np.zeros(0, np.int32), b"")


def prompt_of(ids: Ints, known: Prompt = NO_PROMPT) -> Prompt:
    """A prompt of these ids; what they share with `known` is not written again."""
    shared = len(known) if np.array_equal(ids[: len(known)], known.ids) else 0
    new = msgspec.json.encode(ids[shared:].tolist())[1:-1]
    if not shared:
        return Prompt(ids, new)
    return Prompt(ids, known.text + b"," + new if new else known.text)
