"""Finds out how to talk with an engine that runs already: in token ids, or in chat messages."""

from collections.abc import Iterable

from ...config.specs import Speaks
from ...errors import EngineAway, EngineError, EngineLate
from ..http.endpoint import AWAY_STATUSES
from .control import open_control
from .link import EngineAccess


async def find_speech(engines: Iterable[EngineAccess]) -> Speaks:
    """Return `tokens` if every engine reports the version of its weights: rollway can give it new ones,
    and its dialect takes token ids. Any other endpoint can only be sent messages."""
    for access in engines:
        if not await _reports_version(access):
            return "messages"
    return "tokens"


async def _reports_version(access: EngineAccess) -> bool:
    try:
        async with open_control(access) as control:
            return bool(await control.weight_version())
    except EngineLate:
        raise
    except EngineAway as error:
        if error.status is None or error.status in AWAY_STATUSES:
            raise
        return False
    except EngineError:
        return False  # it refuses such questions, as many chat endpoints do
