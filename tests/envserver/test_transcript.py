"""A transcript is the JSON of its messages, however long they are."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollway.envserver.worker.transcript import EMPTY, SLICE_CHARS, transcript
from rollway.orchestrator.core.batches.packing import at_once
from rollway.records.task import CalledFunction, Message, ToolCall

LONG = "\U0001f600" * SLICE_CHARS, "ä" * SLICE_CHARS + "x"
texts = st.text(max_size=50) | st.sampled_from(["", EMPTY.decode(), '"\\n\u2028', *LONG])
functions = st.builds(CalledFunction, texts, texts)
calls = st.lists(st.builds(ToolCall, st.just("c"), functions), max_size=2).map(tuple)
roles, ids = st.sampled_from(["user", "tool"]), st.none() | st.just("c")
messages = st.builds(Message, roles, texts, st.none() | texts, calls, ids)


@given(st.lists(messages, max_size=4))
def test_long_messages_are_encoded_in_slices_to_the_same_json(talk: list[Message]) -> None:
    assert np.concatenate(at_once(transcript(talk))).tobytes() == msgspec.json.encode(talk)


def test_a_long_message_is_encoded_in_many_slices() -> None:
    slices = transcript([Message("tool", "x" * (10 * SLICE_CHARS))])
    assert sum(1 for _ in slices) == 11


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(UnicodeEncodeError):
        at_once(transcript([Message("tool", "x" * SLICE_CHARS + "\udcff")]))
