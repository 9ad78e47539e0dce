"""Finds signs that a row's text has gone wrong: unlikely tokens, and long runs of certain ones."""

import math

import numpy as np

from ..records.rollout import Detection
from ..records.turn import Floats, Ints

RARE_FROM = 100_000
"""Token ids from here on are rare: vocabularies are sorted by how often their merges occur."""
UNLIKELY_BELOW = -14.0
"""A log-probability below this is very unlikely. A rare token that was so unlikely is gibberish."""
LOOP_TOKENS = 3_000
"""A text that repeats itself has at least this many tokens in a row that were almost certain."""
CERTAIN_ABOVE = math.log(0.99)
"""A log-probability above this is almost certain."""


def detect(token_ids: Ints, logprobs: Floats) -> tuple[Detection, ...]:
    """Return the signs in one row's sampled tokens. Makes a few passes over small columns."""
    found: list[Detection] = []
    if bool(((token_ids >= RARE_FROM) & (logprobs < UNLIKELY_BELOW)).any()):
        found.append("gibberish")
    if longest_run(logprobs > CERTAIN_ABOVE) >= LOOP_TOKENS:
        found.append("repetition")
    return tuple(found)


def longest_run(flags: np.typing.NDArray[np.bool_]) -> int:
    padded = np.concatenate(([False], flags, [False])).astype(np.int8)
    edges = np.flatnonzero(np.diff(padded))
    starts, ends = edges[::2], edges[1::2]
    return int((ends - starts).max(initial=0))
