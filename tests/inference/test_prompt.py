"""Prompts as JSON, written once however often they are extended."""

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollway.inference.engines.prompt import NO_PROMPT, prompt_of

ids = st.lists(st.integers(0, 200_000), max_size=20)


@given(turns=st.lists(ids, max_size=6), anew=st.integers(0, 6))
def test_the_text_is_the_ids(turns: list[list[int]], anew: int) -> None:
    known, so_far = NO_PROMPT, list[int]()
    for number, new in enumerate(turns):
        so_far = new if number == anew else so_far + new
        known = prompt_of(np.array(so_far, np.int32), known)
        assert json.loads(b"[" + known.text + b"]") == so_far
