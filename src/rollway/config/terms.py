"""What a run and an env server elsewhere must agree on, as texts by the keys of the run file.

The server sends its terms when a run connects, and the run compares them with its own. A key that only
one of them has is not compared: a run that gives no arguments takes the environment as it is served.
"""

from pathlib import Path
from typing import Any

import msgspec
from crc32c import crc32c
from msgspec.structs import asdict

from .credentials import hide_all_credentials
from .sections import EngineConfig, EnvConfig, ModelConfig, RunConfig, ServerConfig

Terms = dict[str, str]
DEADLINES = ("rollout_deadline_s", "scoring_deadline_s", "tool_deadline_s")
UNSET = {"engine.routes": "not set", "engine.max_context": "not set"}
"""What a server has that was started from a run file without these keys."""
TOKENIZER = "model.path (its tokenizer.json)"


def terms_of_run(config: RunConfig, env: EnvConfig) -> Terms:
    """Return what a run expects of the server of one of its environments. Blocks to read a file."""
    assert env.external is not None
    is_shared = env.external.shares_payload
    terms = _common(config.model, config.engine, config.seed)
    terms["payload.store"] = _text("files" if is_shared else "frames")
    if is_shared:
        terms["payload.durability"] = _text(config.payload.durability)
    if env.args:
        terms["env.args"] = _text(env.args)
    return terms | (_deadlines(env.server) if env.server else {})


def terms_of_server(
    env: EnvConfig,
    model: ModelConfig,
    engine: EngineConfig,
    seed: int,
    payload: tuple[str, str],
) -> Terms:
    """Return what a server has, with its payload's store and durability. Blocks to read a file."""
    store, durability = payload
    stored = {"payload.store": _text(store), "payload.durability": _text(durability)}
    own = {"env.args": _text(env.args), **_deadlines(env.local)}
    return _common(model, engine, seed) | stored | own


def disagreements(run: Terms, server: Terms) -> list[str]:
    """Return a text for each key on which the two differ."""
    return [
        f"'{key}' is {server[key]} there and {run[key]} in the run"
        for key in run
        if key in server and server[key] != run[key]
    ]


def _common(model: ModelConfig, engine: EngineConfig, seed: int) -> Terms:
    external = engine.external
    terms = {
        "seed": _text(seed),
        "model.renderer": _text(model.renderer),
        "model.template": _text(model.template),
        "engine.request_deadline_s": _text(engine.request_deadline_s),
        "engine.external.fill_ids": _text(bool(external and external.fill_ids)),
    }
    if engine.routes is not None:
        terms["engine.routes"] = _text(engine.routes)
    if engine.max_context is not None:
        terms["engine.max_context"] = _text(engine.max_context)
    tokenizer = Path(model.path, "tokenizer.json")
    if tokenizer.exists():
        terms[TOKENIZER] = f"checksum {crc32c(tokenizer.read_bytes()):08x}"
    return terms


def _deadlines(server: ServerConfig) -> Terms:
    values = asdict(server)
    return {f"env.server.{key}": _text(values[key]) for key in DEADLINES}


def _text(value: Any) -> str:
    """Return a value as JSON, without passwords in URLs: whoever connects to a server gets its terms."""
    return msgspec.json.encode(hide_all_credentials(value), order="sorted").decode()
