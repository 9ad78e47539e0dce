"""Verdicts about an engine's weights: on values that a real load, or a wrong one, would give."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from rollway.inference.engines.dialect import ProbeAnswer
from rollway.inference.engines.verdict import (
    CEILINGS,
    Comparison,
    Tolerance,
    compare,
    find_departing,
    why_refused,
)
from rollway.records.ids import PolicyVersion
from rollway.records.probe import Probe, ProbeText

NUM_TEXTS, NUM_TOKENS = 24, 12
LAYERS, EXPERTS, TOPK = 2, 8, 2
Values = NDArray[np.float64]


class World:
    """The true logprobs of a version and of the one before, and the experts of every token."""

    def __init__(self, seed: int = 0, step: float = 0.05) -> None:
        rng = self.rng = np.random.default_rng(seed)
        shape = (NUM_TEXTS, NUM_TOKENS - 1)
        self.before = -rng.exponential(3.0, shape)
        self.way = step * rng.normal(size=shape)
        grid = (NUM_TEXTS, NUM_TOKENS, LAYERS)
        self.routes = np.array(
            [rng.permutation(EXPERTS)[:TOPK] for _ in range(int(np.prod(grid)))], np.uint16
        ).reshape(*grid, TOPK)

    @property
    def now(self) -> Values:
        return self.before + self.way

    def probe(self, version: int = 3) -> Probe:
        texts = tuple(
            ProbeText(
                tuple(range(NUM_TOKENS)),
                tuple(self.now[text]),
                tuple(self.before[text]) if version else (),
                self.routes[text].tobytes(),
            )
            for text in range(NUM_TEXTS)
        )
        return Probe(
            PolicyVersion(version), "float32", texts, None, tuple(range(LAYERS)), TOPK
        )

    def ask(
        self,
        found: Values,
        dtype: str = "float32",
        version: int = 3,
        routes: NDArray[np.uint16] | None = None,
    ) -> tuple[Comparison, str]:
        """Return how an engine that gives these values compares, and why it is refused."""
        routes = self.routes if routes is None else routes
        tolerance = Tolerance(dtype, CEILINGS[dtype] / 8)
        answers = [
            ProbeAnswer(tuple(found[text]), -0.5, routes[text]) for text in range(NUM_TEXTS)
        ]
        comparison = compare(self.probe(version), answers, tolerance)
        return comparison, why_refused(comparison, version, tolerance)


def noise(world: World, dtype: str) -> Values:
    """Rounding errors as large as those at the start of the run."""
    mean = CEILINGS[dtype] / 8
    return mean * np.sqrt(np.pi / 2) * world.rng.normal(size=world.now.shape)


@given(st.integers(0, 10_000), st.sampled_from(["float32", "bfloat16"]), st.floats(0, 0.5))
def test_a_right_load_is_never_refused(seed: int, dtype: str, step: float) -> None:
    world = World(seed, step)
    comparison, refusal = world.ask(world.now + noise(world, dtype), dtype)
    assert refusal == "", comparison


@given(st.integers(0, 10_000), st.sampled_from([(0.001, "float32"), (0.3, "bfloat16")]))
def test_a_load_that_changes_nothing_is_seen(seed: int, case: tuple[float, str]) -> None:
    step, dtype = case
    world = World(seed, step)
    _, refusal = world.ask(world.before + noise(world, dtype), dtype)
    assert refusal.startswith("it still has the weights of version 2")


def test_a_part_that_is_old_is_seen_below_the_noise() -> None:
    """In bfloat16 the mean difference alone would not show it."""
    world = World(step=0.1)
    found = world.now - 0.4 * world.way + noise(world, "bfloat16") / 4
    comparison, refusal = world.ask(found, "bfloat16")
    assert comparison.mean < CEILINGS["bfloat16"] / 2
    assert refusal.startswith("a part of its weights is old")


@pytest.mark.parametrize(("dtype", "step"), [("float32", 0.02), ("bfloat16", 1.0)])
def test_one_old_expert_is_named(dtype: str, step: float) -> None:
    world = World(step=step)
    goes_there = (world.routes[:, :-1, 1] == 5).any(axis=-1)
    small = noise(world, dtype) / 10
    share = 0.15 if dtype == "float32" else 0.4
    comparison, refusal = world.ask(world.now - share * world.way * goes_there + small, dtype)
    assert comparison.stale_expert == (1, 5)
    assert "expert 5 of layer 1 has old weights" in refusal or comparison.mean > 1e-3


def test_causes_are_told_apart() -> None:
    world = World()
    zeros = np.zeros_like(world.routes)
    others = ((world.routes + 3) % EXPERTS).astype(np.uint16)
    wrong = world.now + world.rng.normal(size=world.now.shape)
    assert "does not record its routes" in world.ask(world.now, routes=zeros)[1]
    assert "experts in a wrong layout" in world.ask(wrong, routes=others)[1]
    assert "does not serve the weights in model.path" in world.ask(wrong, version=0)[1]
    assert "does not give the weights" in world.ask(wrong)[1]
    assert world.ask(world.now, version=0)[1] == ""


def test_values_that_are_not_numbers_are_refused() -> None:
    world = World()
    assert world.ask(np.full_like(world.now, np.nan))[1]


def test_a_start_above_the_ceiling_is_a_mismatch() -> None:
    world = World()
    answers = [
        ProbeAnswer(tuple(world.now[text] + 2e-3), -0.5, world.routes[text])
        for text in range(NUM_TEXTS)
    ]
    tolerance = Tolerance("float32")
    comparison = compare(world.probe(0), answers, tolerance)
    assert "does not serve the weights" in why_refused(comparison, 0, tolerance)
    assert why_refused(comparison, 0, Tolerance("bfloat16")) == ""


def test_an_old_cache_is_seen_after_a_load() -> None:
    comparison = Comparison(10, 1e-6, 1e-5, cache_error=0.05)
    assert "prefix cache" in why_refused(comparison, 1, Tolerance("float32", 1e-6))


def test_an_answer_with_another_number_of_tokens_is_an_error() -> None:
    world = World()
    with pytest.raises(ValueError, match="11 logprobs for 264 tokens"):
        compare(world.probe(), [ProbeAnswer(tuple(world.now[0]), -0.5)], Tolerance())


def test_a_comparison_says_what_was_seen() -> None:
    comparison = Comparison(264, 0.0123, 0.5, moved=0.12, agreeing=0.5)
    assert str(comparison) == (
        "the logprobs of 264 tokens differ by 0.012 on average and 0.5 at most, 50% of the expert "
        "choices agree, and the engine went 12% of the way from the version before"
    )


@pytest.mark.parametrize(
    "kls",
    [
        {},
        {"a": 5.0},
        {"a": 1e-8, "b": 9e-3},
        {"a": 0.02, "b": 0.19},
        {"a": 3.0, "b": 3.1, "c": 0.0},
    ],
)
def test_nothing_departs(kls: dict[str, float]) -> None:
    assert find_departing(kls) is None


@pytest.mark.parametrize(
    "kls", [{"a": 1e-8, "b": 0.011}, {"a": 0.02, "b": 0.21}, {"a": 0.0, "b": 3.0, "c": 0.1}]
)
def test_one_departs(kls: dict[str, float]) -> None:
    found = find_departing(kls)
    assert found is not None
    assert found[0] == "b"
    assert f"{kls['b']:.2g} on rows that it drew" in found[1]
