"""The advantage function of a user: found, checked, and run in a process of its own."""

import importlib
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from ...config.sections import OrchestratorConfig
from ...errors import AdvantageError, ConfigError, LaneError, LaneRaised, did_you_mean
from ...loop.lanes.lanes import ProcessLane
from ...loop.lanes.user_files import import_file
from ...loop.watch import stacks
from ...loop.watch.run import LoopWatch
from ...records.ids import GroupId
from ...records.scores import one_for_each
from ..core.batches.credit import BASELINES
from ..core.commands import Credit

BUILT_IN = tuple(BASELINES)
TRIAL = Credit(GroupId(0), (0.0, 1.0), (3, 5), (1, 1))
"""A group with which a function is tried before a run starts."""
OPTIONAL = ("num_tokens", "num_turns")
"""What a function gets by keyword if it has a parameter of that name: one number for each rollout."""
LOAD_DEADLINE_S = 60.0
CREDIT_DEADLINE_S = 30.0
"""A function that takes longer for one group ends the run: it would be too slow for all of them."""


class CreditLane:
    """Asks the advantage function about one group at a time, in another process."""

    def __init__(
        self,
        advantage: str,
        lane: ProcessLane,
        max_groups: int,
        deadline_s: float = CREDIT_DEADLINE_S,
    ) -> None:
        self._advantage = advantage
        self._deadline_s = deadline_s
        self._queue_s = deadline_s * max(1, max_groups)
        self._lane = lane

    async def credit(self, order: Credit) -> tuple[float, ...]:
        """Return one advantage for each rollout. An error ends the run, as every group would fail."""
        where = f"orchestrator.advantage '{self._advantage}'"
        try:
            advantages = await self._lane.call(
                credit,
                self._advantage,
                order,
                deadline_s=self._deadline_s,
                queue_s=self._queue_s,
            )
        except LaneRaised as error:
            raise AdvantageError(f"{where} failed at {error.where}: {error}") from None
        except LaneError as error:
            raise AdvantageError(f"{where}: {error}") from None
        if isinstance(advantages, str):
            raise AdvantageError(f"{where}: {advantages}")
        return advantages


@asynccontextmanager
async def credit_lane(
    config: OrchestratorConfig, watch: LoopWatch, max_groups: int
) -> AsyncIterator[CreditLane | None]:
    """Start a process for the function ahead of need; None if the advantage is built in."""
    if is_built_in(config.advantage):
        yield None
        return
    warm = (problem_of, config.advantage)
    async with ProcessLane(
        "advantage", 1, warm=warm, label="advantage", watch=watch, max_waiting=max_groups
    ) as lane:
        yield CreditLane(config.advantage, lane, max_groups)


async def check(config: OrchestratorConfig) -> None:
    """Refuse a function that cannot be used, before anything slow starts. Runs it in a lane."""
    if is_built_in(config.advantage):
        return
    async with ProcessLane("advantage-check", 1) as lane:
        try:
            problem = await lane.call(
                problem_of, config.advantage, deadline_s=LOAD_DEADLINE_S
            )
        except LaneError as error:
            problem = str(error)
    if problem:
        raise ConfigError(f"'orchestrator.advantage' = {config.advantage!r}: {problem}")


def is_built_in(advantage: str) -> bool:
    """Return whether the core computes it itself. Refuse a name that is neither built in nor a path."""
    if advantage in BUILT_IN:
        return True
    if ":" not in advantage:
        raise ConfigError(
            f"'orchestrator.advantage' = {advantage!r}: not built in{did_you_mean(advantage, BUILT_IN)} "
            f"(built in: {', '.join(BUILT_IN)}; your own: path/to/file.py:function or "
            "package.module:function)"
        )
    return False


def problem_of(advantage: str) -> str:
    """Say why the function cannot be used; empty if it can. Runs in the lane."""
    try:
        find(advantage)
    except ConfigError as error:
        return str(error)
    try:
        found = credit(advantage, TRIAL)
    except Exception as error:  # of user code
        place = stacks.where_raised(error)
        text = f"for the rewards 0 and 1 it raised {type(error).__name__}: {error}"
        return f"{text}, at {place}" if place else text
    return found if isinstance(found, str) else ""


def credit(advantage: str, order: Credit) -> tuple[float, ...] | str:
    """Return the advantages of a group, or say what is wrong with them. Runs in the lane."""
    function, optional = find(advantage)
    counts = {"num_tokens": order.num_tokens, "num_turns": order.num_turns}
    result = function(list(order.rewards), **{name: list(counts[name]) for name in optional})
    code = function.__code__
    source = f"{function.__name__} at {code.co_filename}:{code.co_firstlineno}"
    try:
        return tuple(one_for_each(source, result, len(order.rewards), "advantages"))
    except (TypeError, ValueError) as error:
        return str(error)


@cache
def find(advantage: str) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """Return the function, and which of the optional counts it takes. Runs in the lane."""
    where, _, name = advantage.rpartition(":")
    members = vars(_import(where)).items()
    functions = {key: value for key, value in members if inspect.isfunction(value)}
    if name not in functions:
        raise ConfigError(f"no function '{name}' in {where}{did_you_mean(name, functions)}")
    return functions[name], _optional_parameters(functions[name])


def _import(where: str) -> ModuleType:
    if not where.endswith(".py"):
        try:
            return importlib.import_module(where)
        except ImportError as error:
            raise ConfigError(f"cannot import {where}: {error}") from None
    path = Path(where).resolve()
    if not path.is_file():
        near = did_you_mean(path.name, [file.name for file in path.parent.glob("*.py")])
        raise ConfigError(f"no file at {path}{near}")
    try:
        return import_file(path)
    except Exception as error:  # importing runs the user's code
        raise ConfigError(f"cannot import {path}: {type(error).__name__}: {error}") from None


def _optional_parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Check that the function takes the rewards first and needs nothing unknown."""
    parameters = list(inspect.signature(function).parameters.values())
    kinds = inspect.Parameter
    positional = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    if not parameters or parameters[0].kind not in positional:
        raise ConfigError(f"{function.__name__}() must take the group's rewards first")
    others = {parameter.name: parameter for parameter in parameters[1:]}
    for name, parameter in others.items():
        is_variadic = parameter.kind in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
        is_required = parameter.default is kinds.empty and not is_variadic
        if is_required and name not in OPTIONAL:
            raise ConfigError(
                f"{function.__name__}() needs '{name}'{did_you_mean(name, OPTIONAL)}; "
                f"it gets the rewards, and by keyword {' and '.join(OPTIONAL)}"
            )
    takes_any = any(other.kind is kinds.VAR_KEYWORD for other in others.values())
    return tuple(name for name in OPTIONAL if takes_any or name in others)
