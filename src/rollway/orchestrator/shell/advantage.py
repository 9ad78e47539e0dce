"""An advantage function of the user's: found, checked, and run in a process of its own."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from ...config.sections import OrchestratorConfig
from ...errors import AdvantageError, ConfigError, LaneError, LaneRaised, did_you_mean
from ...loop.lanes.lanes import ProcessLane
from ...loop.watch.run import LoopWatch
from ..core.batches.credit import BASELINES, checked
from ..core.commands import Credit

BUILT_IN = tuple(BASELINES)
OPTIONAL = ("num_tokens", "num_turns")
"""What a function gets by keyword if it asks for it, one number for each rollout."""
LOAD_DEADLINE_S = 60.0


class CreditLane:
    """Asks the function of `config.advantage` about one group at a time, off the loop."""

    def __init__(self, config: OrchestratorConfig, lane: ProcessLane, max_groups: int) -> None:
        self._spec = config.advantage
        self._deadline_s = config.advantage_deadline_s
        self._queue_s = config.advantage_deadline_s * max(1, max_groups)
        self._lane = lane

    async def credit(self, order: Credit) -> tuple[float, ...]:
        """One advantage for each rollout; a function that fails would fail for every group."""
        try:
            given = await self._lane.call(
                credit, self._spec, order, deadline_s=self._deadline_s, queue_s=self._queue_s
            )
        except LaneRaised as error:
            raise AdvantageError(
                f"orchestrator.advantage '{self._spec}' failed at {error.where}: {error}"
            ) from None
        except LaneError as error:
            raise AdvantageError(f"orchestrator.advantage '{self._spec}': {error}") from None
        if isinstance(given, str):
            raise AdvantageError(f"orchestrator.advantage '{self._spec}': {given}")
        return given


@asynccontextmanager
async def credit_lane(
    config: OrchestratorConfig, watch: LoopWatch, max_groups: int
) -> AsyncIterator[CreditLane | None]:
    """A process for the function, started ahead of need; None for what is built in."""
    if is_built_in(config.advantage):
        yield None
        return
    warm = (problem_of, config.advantage)
    async with ProcessLane(
        "advantage", 1, warm=warm, what="advantage", watch=watch, max_waiting=max_groups
    ) as lane:
        yield CreditLane(config, lane, max_groups)


async def check(config: OrchestratorConfig) -> None:
    """Refuse a name that leads nowhere before anything slow is started. User code runs elsewhere."""
    if is_built_in(config.advantage):
        return
    async with ProcessLane("advantage-check", 1) as lane:
        try:
            problem = await lane.call(problem_of, config.advantage, deadline_s=LOAD_DEADLINE_S)
        except LaneError as error:
            problem = str(error)
    if problem:
        raise ConfigError(f"'orchestrator.advantage' = {config.advantage!r}: {problem}")


def is_built_in(spec: str) -> bool:
    """Whether the core does it by itself; a name that is neither built in nor a path is refused."""
    if spec in BUILT_IN:
        return True
    if ":" not in spec:
        raise ConfigError(
            f"'orchestrator.advantage' = {spec!r}: not built in{did_you_mean(spec, BUILT_IN)} "
            f"(built in: {', '.join(BUILT_IN)}; your own: path/to/file.py:function or "
            "package.module:function)"
        )
    return False


def problem_of(spec: str) -> str:
    """Why the function cannot be used; empty if it can. Runs in the lane."""
    try:
        find(spec)
    except ConfigError as error:
        return str(error)
    return ""


def credit(spec: str, order: Credit) -> tuple[float, ...] | str:
    """What the function makes of one group, or what is wrong with that. Runs in the lane."""
    function, extras = find(spec)
    counts = {"num_tokens": order.num_tokens, "num_turns": order.num_turns}
    given = function(list(order.rewards), **{name: list(counts[name]) for name in extras})
    try:
        return checked(given, len(order.rewards))
    except (TypeError, ValueError) as error:
        line = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
        return f"{function.__name__} at {line} {error}"


@cache
def find(spec: str) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """The function, and which of the optional counts it asks for. Runs in the lane."""
    where, _, name = spec.rpartition(":")
    module = _import(where)
    functions = {key: one for key, one in vars(module).items() if inspect.isfunction(one)}
    if name not in functions:
        raise ConfigError(f"no function '{name}' in {where}{did_you_mean(name, functions)}")
    return functions[name], _extras(functions[name])


def _import(where: str) -> ModuleType:
    if not where.endswith(".py"):
        try:
            return importlib.import_module(where)
        except ImportError as error:
            raise ConfigError(f"cannot import {where}: {error}") from None
    path = Path(where).resolve()
    if not path.is_file():
        near = did_you_mean(path.name, [one.name for one in path.parent.glob("*.py")])
        raise ConfigError(f"no file at {path}{near}")
    spec = importlib.util.spec_from_file_location(f"rollway_advantage_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # importing runs the user's code
        raise ConfigError(f"cannot import {path}: {type(error).__name__}: {error}") from None
    return module


def _extras(function: Callable[..., Any]) -> tuple[str, ...]:
    """Checks that the function can be called with rewards, and with nothing that is not known."""
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters or parameters[0].kind not in (
        inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    ):  # fmt: skip
        raise ConfigError(f"{function.__name__}() must take the group's rewards first")
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)
    names = {one.name for one in parameters[1:]}
    for one in parameters[1:]:
        needed = one.default is inspect.Parameter.empty and one.kind not in (
            inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
        )  # fmt: skip
        if needed and one.name not in OPTIONAL:
            hint = did_you_mean(one.name, OPTIONAL)
            raise ConfigError(
                f"{function.__name__}() needs '{one.name}'{hint}; it gets the rewards, and by keyword "
                f"{' and '.join(OPTIONAL)}"
            )
    return tuple(name for name in OPTIONAL if takes_any or name in names)
