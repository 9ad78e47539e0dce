"""A lane for code that no other process could import."""

import asyncio
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

from ..envs.in_lane import EnvSpec
from ..errors import LaneTimeout
from ..loop.lanes.lanes import MAX_QUEUE_S
from ..loop.lanes.server import LaneAnswer, LaneResult, ask_caller, describe, dumps
from ..loop.lanes.slot import Replier
from ..loop.lanes.threads import thread

T = TypeVar("T")


class ThreadLane:
    """Runs calls in threads of this process. They cannot be killed: a late call is left to run on."""

    async def call(
        self, function: Callable[..., T], *args: Any, deadline_s: float, queue_s: float = MAX_QUEUE_S,
        replier: Replier | None = None, on_start: Callable[[], None] = lambda: None,
    ) -> T:  # fmt: skip
        on_start()
        copies = [value if isinstance(value, EnvSpec) else _send(value) for value in args]
        loop = asyncio.get_running_loop()

        def ask(value: Any) -> Any:
            assert replier is not None
            reply = _reply(replier, _send(value))
            return _send(asyncio.run_coroutine_threadsafe(reply, loop).result())

        def run() -> LaneAnswer:
            ask_caller.set(ask)
            try:
                return LaneResult(_send(function(*copies)))
            except Exception as error:  # user code raises what it likes
                return describe(error)

        try:
            async with asyncio.timeout(deadline_s):
                answer = await thread(run)
        except TimeoutError:
            name = f"{function.__module__}.{function.__qualname__}"
            raise LaneTimeout(f"{name} ran longer than {deadline_s:g} s") from None
        result: T = answer.take()
        return result


def _send(value: T) -> T:
    """Return a value as it would arrive in another process. What pickle refuses is refused here too."""
    arrived: T = pickle.loads(dumps(value))
    return arrived


async def _reply(replier: Replier, value: Any) -> Any:
    return await replier(value)
