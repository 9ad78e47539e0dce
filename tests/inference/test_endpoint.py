"""Error messages and pauses between tries, for clients of engines and of chat endpoints."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollway.inference.http.endpoint import (
    LONGEST_PAUSE_S,
    back_off_s,
    describe_error,
    retry_after_s,
)


def test_an_error_is_described_in_the_words_of_the_engine() -> None:
    body = (
        b'{"error": {"message": "prompt too long", "type": "BadRequestError", "code": 400}}'
    )
    assert describe_error(400, body) == "HTTP 400: prompt too long"
    assert describe_error(502, b"Bad Gateway") == "HTTP 502: Bad Gateway"


@given(st.integers(1, 10_000), st.floats(0, 1))
def test_pauses_grow_up_to_a_bound(num_refused: int, luck: float) -> None:
    assert 0.25 <= back_off_s(num_refused, luck) <= LONGEST_PAUSE_S
    assert back_off_s(num_refused, luck) <= back_off_s(num_refused + 1, luck)


@pytest.mark.parametrize(
    ("text", "pause_s"),
    [("3", 3.0), ("0.5", 0.5), ("0", 0.0), ("", None), ("soon", None),
     ("-1", None), ("inf", None), ("-inf", None), ("nan", None), ("1e999", None),
     ("Wed, 21 Oct 2026 07:28:30 GMT", 30.0), ("Wed, 21 Oct 2026 07:27:00 GMT", 0.0),
     ("Wed, 21 Oct 99999999999999999999 07:28:30 GMT", None)],
)  # fmt: skip
def test_retry_after_is_a_number_or_a_date(text: str, pause_s: float | None) -> None:
    now = datetime(2026, 10, 21, 7, 28, tzinfo=UTC)
    assert retry_after_s({"retry-after": text}, now) == pause_s
