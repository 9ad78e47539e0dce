"""The signs of broken text are those that a plain loop over the tokens finds."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollway.trace.detect import DetectionRules, detect, longest_run

RULES = DetectionRules(rare_from=100, unlikely_below=-14.0, run_length=4, certain_above=0.99)
sampled_tokens = st.lists(
    st.tuples(st.integers(0, 200), st.sampled_from([-20.0, -13.0, -1.0, -0.02, -0.001])), max_size=40
)


@given(st.lists(st.booleans()))
def test_the_longest_run(flags: list[bool]) -> None:
    text = "".join("x" if flag else " " for flag in flags)
    assert longest_run(np.array(flags, bool)) == max(map(len, text.split()), default=0)


@given(sampled_tokens)
def test_signs_are_those_a_plain_loop_finds(tokens: list[tuple[int, float]]) -> None:
    run = longest = 0
    for _, logprob in tokens:
        run = run + 1 if math.exp(logprob) > 0.99 else 0
        longest = max(longest, run)
    expected = []
    if any(token_id >= 100 and logprob < -14 for token_id, logprob in tokens):
        expected.append("gibberish")
    if longest >= 4:
        expected.append("repetition")
    ids = np.array([token_id for token_id, _ in tokens], np.int32)
    logprobs = np.array([logprob for _, logprob in tokens], np.float32)
    assert list(detect(ids, logprobs, RULES)) == expected
