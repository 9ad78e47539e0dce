"""Signs that a row's text has gone wrong, from its drawn tokens and how likely they were."""

import math

import numpy as np
from msgspec import Struct

from ..records.rollout import Detection
from ..records.turn import Floats, Ints


class Signs(Struct, frozen=True):
    """What counts as a sign.

    Gibberish: a token from the rare end of the vocabulary, drawn where it was very unlikely. Repetition:
    so many tokens in a row that were each almost certain.
    """

    rare_from: int
    unlikely_below: float
    """Log-probability."""
    run_length: int
    certain_above: float
    """Probability."""


def detect(token_ids: Ints, logprobs: Floats, signs: Signs) -> tuple[Detection, ...]:
    """The signs in one row's drawn tokens. A few passes over small columns."""
    found: list[Detection] = []
    if bool(((token_ids >= signs.rare_from) & (logprobs < signs.unlikely_below)).any()):
        found.append("gibberish")
    if longest_run(logprobs > math.log(signs.certain_above)) >= signs.run_length:
        found.append("repetition")
    return tuple(found)


def longest_run(flags: np.typing.NDArray[np.bool_]) -> int:
    """The greatest number of true values next to each other."""
    if not flags.any():
        return 0
    ends = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    return int((ends[1::2] - ends[::2]).max())
