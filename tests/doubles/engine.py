"""The scripted engine, for tests in which the answer depends on the last message only."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from rollway.testing.engine import ScriptedEngine as EngineDouble
from rollway.testing.engine import routes_of, scripted_engine

__all__ = ["EngineDouble", "engine_double", "routes_of"]


@asynccontextmanager
async def engine_double(
    folder: Path, answer: Callable[[str], str], latency_s: float = 0.0
) -> AsyncIterator[EngineDouble]:
    """Serve on a free port. `folder` holds the tokenizer."""
    async with scripted_engine(
        lambda prompt: answer(prompt.last_text), latency_s=latency_s, folder=folder
    ) as engine:
        yield engine
