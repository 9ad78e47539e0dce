"""Which version drew which token, when weights are loaded while replies are drawn."""

import json
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from rollway.vllm.token_versions import TokenVersions


def load(versions: TokenVersions, version: object, drawn: Mapping[str, int]) -> None:
    named = {f"{name}-1a2b3c4d": count for name, count in drawn.items()}
    result = {"version": str(version), "drawn": named}
    versions.note_load(json.dumps({"results": [result, result]}).encode())


def test_before_the_first_load_versions_are_not_known() -> None:
    versions = TokenVersions()
    early = versions.begin()
    assert versions.end(early, 3) is None
    load(versions, 4, {early: 2})
    assert versions.end(early, 3) is None, "nothing is known of its first two tokens"
    late = versions.begin()
    found = versions.end(late, 2)
    assert found is not None
    assert found.tolist() == [4, 4]


def test_a_request_that_waits_while_weights_are_loaded_is_drawn_by_the_new_ones() -> None:
    versions = TokenVersions()
    load(versions, 1, {})
    waiting = versions.begin()
    load(versions, 2, {"another": 5})
    found = versions.end(waiting, 2)
    assert found is not None
    assert found.tolist() == [2, 2]


def test_a_worker_that_cannot_count_leaves_running_requests_without_versions() -> None:
    versions = TokenVersions()
    load(versions, 1, {})
    running = versions.begin()
    versions.note_load(b'{"results": [{"version": "2", "drawn": null}]}')
    assert versions.end(running, 3) is None
    later = versions.end(versions.begin(), 1)
    assert later is not None
    assert later.tolist() == [2]


def test_answers_to_other_calls_are_no_loads() -> None:
    versions = TokenVersions()
    for body in (b"", b"null", b'{"results": []}', b'{"results": [null]}', b'{"results": [{}]}',
                 b'{"results": [{"version": "new", "drawn": {}}]}'):  # fmt: skip
        versions.note_load(body)
    assert versions.end(versions.begin(), 1) is None


@given(st.lists(st.integers(0, 5), max_size=5), st.integers(1, 5))
def test_each_token_has_the_version_that_was_loaded_when_it_was_drawn(
    steps: list[int], last: int
) -> None:
    """Draw some tokens, load, draw some, load, and so on."""
    versions = TokenVersions()
    load(versions, 0, {})
    name, expected = versions.begin(), []
    for number, count in enumerate(steps):
        expected += [number] * count
        load(versions, number + 1, {name: len(expected)})
    expected += [len(steps)] * last
    found = versions.end(name, len(expected))
    assert found is not None
    assert found.tolist() == expected
    versions.forget(name)
    assert versions.end(name, 1) is None
