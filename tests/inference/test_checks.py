"""Replies that the model cannot have given are refused, with the reason."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollway.errors import EngineError
from rollway.inference.replies.checks import ReplyRules
from rollway.inference.replies.columns import ReplyColumns
from rollway.model.shape import ModelShape, find_repeats
from rollway.records.turn import Routes

DENSE_FIRST = ModelShape(
    family="glm4_moe",
    vocab_size=100,
    num_layers=4,
    num_experts=8,
    topk=2,
    moe_layers=(1, 2, 3),
)
RULES = ReplyRules(wants_routes=True, shape=DENSE_FIRST, knows_versions=True)


def reply(**changes: object) -> ReplyColumns:
    columns = {
        "token_ids": np.array([1, 2, 99], np.int32),
        "logprobs": np.array([-0.5, 0.0, -30.0], np.float32),
        "versions": np.array([3, 3, 4], np.int32),
        "finish_reason": "stop",
    }
    return ReplyColumns(**{**columns, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"token_ids": np.array([1, 100], np.int32)},
            "the vocabulary of 'model.path' has 100",
        ),
        ({"token_ids": np.array([-1], np.int32)}, "token ids from -1"),
        ({"logprobs": np.array([0.1], np.float32)}, "a logprob is at most 0"),
        ({"logprobs": np.array([-9999.0], np.float32)}, "stands for minus infinity"),
        ({"versions": np.array([-1, 3], np.int32)}, "versions -1 to 3"),
        ({"versions": np.array([3, 9], np.int32)}, "the versions so far are 0 to 4"),
        ({"finish_reason": "abort"}, "finish_reason 'abort'"),
        ({"finish_reason": "tired"}, "finish_reason 'tired'"),
    ],
)
def test_columns_that_no_policy_drew(changes: dict[str, object], message: str) -> None:
    RULES.check_columns(reply(), version=4)
    with pytest.raises(EngineError, match=message):
        RULES.check_columns(reply(**changes), version=4)


def good(num_layers: int = 3) -> Routes:
    rng = np.random.default_rng(0)
    chosen = [rng.permutation(8)[:2] for _ in range(10 * num_layers)]
    return np.array(chosen, np.uint8).reshape(10, num_layers, 2)


def all_layers() -> Routes:
    routes = good(4)
    routes[:, 0] = 0
    return routes


def repeated(routes: Routes) -> Routes:
    routes[7, 2] = 5
    return routes


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (
            good(2),
            r"2 layers × 2 experts, but the model \(glm4_moe\) has 3 or 4 × 2",
        ),
        (good()[..., :1], "3 layers × 1 experts"),
        (np.moveaxis(good(), 0, 2), "layers"),
        (good() + np.uint8(7), r"name expert \d+, but the model has 8"),
        (np.zeros_like(good()), "are all zero"),
        (repeated(good()), "send 1 of 10 tokens to one expert twice"),
        (repeated(all_layers()), "send 1 of 10 tokens to one expert twice"),
    ],
)
def test_routes_that_no_router_chose(routes: Routes, message: str) -> None:
    RULES.check_routes(good(), 7)
    RULES.check_routes(all_layers(), 7)
    with pytest.raises(EngineError, match=message):
        RULES.check_routes(routes, int(routes.max()))


def test_without_knowledge_of_the_layers_zeros_of_whole_layers_are_allowed() -> None:
    shape = ModelShape(num_layers=4, num_experts=8, topk=2)
    rules = ReplyRules(wants_routes=True, shape=shape)
    rules.check_routes(all_layers(), 7)
    with pytest.raises(EngineError, match="twice"):
        rules.check_routes(repeated(all_layers()), 7)
    with pytest.raises(EngineError, match="are all zero"):
        rules.check_routes(np.zeros((5, 4, 2), np.uint8), 0)


@given(
    topk=st.integers(2, 20),
    tokens=st.integers(1, 30),
    seed=st.integers(0, 1000),
    wide=st.booleans(),
)
def test_repeated_experts_are_found_wherever_they_are(
    topk: int, tokens: int, seed: int, wide: bool
) -> None:
    rng = np.random.default_rng(seed)
    routes = rng.integers(0, 24, (tokens, 3, topk)).astype(np.uint16 if wide else np.uint8)
    expected = [[len(set(chosen)) < topk for chosen in token] for token in routes.tolist()]
    assert find_repeats(routes).tolist() == expected


def test_of_many_routes_some_are_checked() -> None:
    routes = np.zeros((40_000, 4, 2), np.uint8)
    routes[..., 1] = 1
    RULES.check_routes(routes, 1)
    routes[:, 2] = 3
    with pytest.raises(EngineError, match="to one expert twice"):
        RULES.check_routes(routes, 3)


def test_zeros_of_a_model_that_chooses_one_expert() -> None:
    """A few tokens may all go to the first expert, but not many."""
    rules = ReplyRules(wants_routes=True, shape=ModelShape(num_experts=16, topk=1))
    rules.check_routes(np.zeros((10, 4, 1), np.uint8), 0)
    with pytest.raises(EngineError, match="are all zero"):
        rules.check_routes(np.zeros((40, 4, 1), np.uint8), 0)
