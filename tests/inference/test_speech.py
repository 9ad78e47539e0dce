"""How rollway finds out whether an engine takes token ids."""

import pytest
from tests.doubles.chat import chat_double
from tests.doubles.versioned import VersionedEngine

from rollway.errors import EngineError
from rollway.inference.engines.link import EngineAccess
from rollway.inference.engines.speech import find_speech

pytestmark = pytest.mark.anyio


def echo(text: str, num_before: int) -> str:
    return text


async def test_an_engine_that_reports_a_version_takes_token_ids() -> None:
    engine = VersionedEngine()
    await engine.start()
    try:
        access = EngineAccess(engine.url, 10.0)
        assert await find_speech([access]) == "tokens"
        async with chat_double(echo) as double:
            with pytest.raises(EngineError, match="must be of one kind"):
                await find_speech([access, EngineAccess(double.url, 10.0)])
    finally:
        await engine.stop()


@pytest.mark.parametrize("models", [(), ("double",)])
async def test_a_chat_endpoint_takes_messages(models: tuple[str, ...]) -> None:
    async with chat_double(echo, key="secret", models=models) as double:
        assert await find_speech([EngineAccess(double.url, 10.0)]) == "messages"


async def test_nothing_listens() -> None:
    with pytest.raises(EngineError, match="no engine at"):
        await find_speech([EngineAccess("http://127.0.0.1:9/v1", 10.0)])
