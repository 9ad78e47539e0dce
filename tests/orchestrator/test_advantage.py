"""Advantage functions of the user's: found, refused, run in a process, and named when they fail."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.doubles import credit as doubles

from rollway.config.sections import OrchestratorConfig
from rollway.errors import AdvantageError, ConfigError
from rollway.loop.lanes.lanes import ProcessLane
from rollway.loop.lanes.user_files import import_file
from rollway.orchestrator.core.commands import Credit
from rollway.orchestrator.shell.advantage import CreditLane, check
from rollway.records.ids import GroupId

pytestmark = pytest.mark.anyio

FILE = str(Path(__file__).parents[1] / "doubles" / "credit.py")
ORDER = Credit(GroupId(1), (1.0, 0.0, 1.0), (30, 5, 10), (1, 1, 2))


def line_in(function: Callable[..., Any]) -> str:
    """The first line below a function's head."""
    return f"{FILE}:{function.__code__.co_firstlineno + 1}"


def config(advantage: str) -> OrchestratorConfig:
    return OrchestratorConfig(advantage=advantage)


async def credit(lane: ProcessLane, function: str) -> tuple[float, ...]:
    return await CreditLane(f"{FILE}:{function}", lane, max_groups=4, deadline_s=10.0).credit(
        ORDER
    )


async def test_functions_get_rewards_and_the_counts_they_ask_for() -> None:
    async with ProcessLane("test", 1) as lane:
        rewards = list(ORDER.rewards)
        assert await credit(lane, "centred") == tuple(doubles.centred(rewards))
        counts = {"num_tokens": list(ORDER.num_tokens), "num_turns": list(ORDER.num_turns)}
        assert await credit(lane, "shorter") == tuple(doubles.shorter(rewards, **counts))
        by_module = CreditLane("tests.doubles.credit:centred", lane, max_groups=4)
        assert await by_module.credit(ORDER) == tuple(doubles.centred(rewards))


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("raises", f"failed at {line_in(doubles.raises)} in raises: KeyError: 'no baseline'"),
        (
            "sticks",
            f"ran longer than 10 s and was killed, at {line_in(doubles.sticks)} in sticks",
        ),
        ("dies", "ended its process with exit code 4"),
        ("too_short", "returned 2 advantages for 3 rollouts"),
        ("not_finite", "returned nan for rollout 0, not a finite number"),
        ("not_a_list", "returned a float, not a list of numbers"),
    ],
)
async def test_a_function_that_fails_is_named_with_its_line(function: str, said: str) -> None:
    async with ProcessLane("test", 1) as lane:
        with pytest.raises(AdvantageError) as raised:
            await credit(lane, function)
        assert f"orchestrator.advantage '{FILE}:{function}'" in str(raised.value)
        assert said in str(raised.value)
        assert f"{FILE}:" in str(raised.value)
        assert await credit(lane, "centred")


@pytest.mark.parametrize(
    ("advantage", "said"),
    [
        ("grpoo", "not built in; did you mean 'grpo'?"),
        (f"{FILE}:centered", "no function 'centered' in "),
        (f"{FILE}:centered", "did you mean 'centred'?"),
        (f"{FILE.replace('credit', 'credits')}:centred", "did you mean 'credit.py'?"),
        ("no.such.module:f", "cannot import no.such.module"),
        (f"{FILE}:needs_more", "needs_more() needs 'num_token'; did you mean 'num_tokens'?"),
        (f"{FILE}:takes_nothing", "takes_nothing() must take the group's rewards first"),
    ],
)
async def test_a_name_that_leads_nowhere_is_refused_at_the_start(
    advantage: str, said: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        await check(config(advantage))
    assert str(raised.value).startswith(f"'orchestrator.advantage' = {advantage!r}: ")
    assert said in str(raised.value)


async def test_two_files_with_the_same_name_do_not_collide(tmp_path: Path) -> None:
    for folder, value in (("a", 1.0), ("b", 2.0)):
        (tmp_path / folder).mkdir()
        source = f"def credit(rewards):\n    return [{value}] * len(rewards)\n"
        (tmp_path / folder / "mine.py").write_text(source)
    async with ProcessLane("test", 1) as lane:
        for folder, value in (("a", 1.0), ("b", 2.0)):
            advantage = f"{tmp_path / folder / 'mine.py'}:credit"
            assert (
                await CreditLane(advantage, lane, max_groups=4).credit(ORDER) == (value,) * 3
            )


async def test_a_file_that_raises_leaves_no_half_loaded_module(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("x = 1\nraise ValueError('not today')\n")
    before = set(sys.modules)
    for _ in range(2):
        with pytest.raises(ValueError, match="not today"):
            import_file(path)
    assert set(sys.modules) == before


async def test_functions_that_can_be_used_are_accepted() -> None:
    for advantage in (
        "grpo",
        f"{FILE}:centred",
        f"{FILE}:shorter",
        "tests.doubles.credit:slow",
    ):
        await check(config(advantage))
