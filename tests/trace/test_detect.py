"""The signs of broken text are those that a plain loop over the tokens finds."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollway.trace.detect import LOOP_TOKENS, RARE_FROM, UNLIKELY_BELOW, detect, longest_run

token_runs = st.lists(
    st.tuples(
        st.sampled_from([7, RARE_FROM - 1, RARE_FROM]),
        st.sampled_from([UNLIKELY_BELOW - 1, UNLIKELY_BELOW + 1, -1.0, -0.02, -0.001]),
        st.sampled_from([1, 2, LOOP_TOKENS // 2, LOOP_TOKENS - 1, LOOP_TOKENS]),
    ),
    max_size=6,
)
"""Token id, log-probability, and how many such tokens follow each other."""


@given(st.lists(st.booleans()))
def test_the_longest_run(flags: list[bool]) -> None:
    text = "".join("x" if flag else " " for flag in flags)
    assert longest_run(np.array(flags, bool)) == max(map(len, text.split()), default=0)


@given(token_runs)
def test_signs_are_those_a_plain_loop_finds(runs: list[tuple[int, float, int]]) -> None:
    length = longest = 0
    for _, logprob, count in runs:
        length = length + count if math.exp(logprob) > 0.99 else 0
        longest = max(longest, length)
    expected = []
    if any(
        token_id >= RARE_FROM and logprob < UNLIKELY_BELOW for token_id, logprob, _ in runs
    ):
        expected.append("gibberish")
    if longest >= LOOP_TOKENS:
        expected.append("repetition")
    counts = [count for _, _, count in runs]
    ids = np.repeat(np.array([token_id for token_id, _, _ in runs], np.int32), counts)
    logprobs = np.repeat(np.array([logprob for _, logprob, _ in runs], np.float32), counts)
    assert list(detect(ids, logprobs)) == expected
