"""Finds out how to talk with an engine that runs already: in token ids, or in chat messages."""

from collections.abc import Iterable

from ...config.specs import Speaks
from ...errors import EngineAway, EngineError, EngineLate
from .control import open_control
from .link import EngineAccess

NOT_KNOWN = (401, 403, 405)
"""How endpoints refuse paths that they do not have, besides 404."""


async def find_speech(engines: Iterable[EngineAccess]) -> Speaks:
    """Return `tokens` if the engines report the version of their weights: they take token ids, and new
    weights. Other endpoints can only be sent messages. Raise EngineError if there are both kinds."""
    found: dict[Speaks, str] = {}
    for access in engines:
        found["tokens" if await _reports_version(access) else "messages"] = access.url
    if len(found) > 1:
        raise EngineError(
            f"the engine at {found['tokens']} reports the version of its weights, the one at "
            f"{found['messages']} does not: all engines of a run must be of one kind (vLLM reports it "
            "with VLLM_SERVER_DEV_MODE=1 in its environment)"
        )
    return next(iter(found))


async def _reports_version(access: EngineAccess) -> bool:
    try:
        async with open_control(access, proxied=True) as control:
            return bool(await control.weight_version())
    except EngineLate:
        raise
    except EngineAway as error:
        if error.status not in NOT_KNOWN:
            raise
        return False
    except EngineError:
        return False  # its list of models is not that of an engine
