"""The scripted engine, for tests in which the answer depends on the last message only."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from rollway.inference.replies.checks import ReplyRules
from rollway.testing.engine import ScriptedEngine as EngineDouble
from rollway.testing.engine import routes_of, scripted_engine

__all__ = ["NO_ROUTES", "WITH_ROUTES", "EngineDouble", "engine_double", "routes_of"]

WITH_ROUTES, NO_ROUTES = ReplyRules(wants_routes=True), ReplyRules(wants_routes=False)
"""How replies are checked if nothing is known of the model."""


@asynccontextmanager
async def engine_double(
    folder: Path, answer: Callable[[str], str], latency_s: float = 0.0
) -> AsyncIterator[EngineDouble]:
    """Serve on a free port. `folder` holds the tokenizer."""
    async with scripted_engine(
        lambda prompt: answer(prompt.last_text), latency_s=latency_s, folder=folder
    ) as engine:
        yield engine
