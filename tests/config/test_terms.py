"""What a run and a server must agree on: each key that differs is named, and no other."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from rollway.config.load import check
from rollway.config.sections import EnvConfig, RunConfig, ServerConfig
from rollway.config.terms import (
    TOKENIZER,
    Terms,
    disagreements,
    terms_of_run,
    terms_of_server,
)

RUN: dict[str, Any] = {
    "name": "run",
    "seed": 3,
    "env": [
        {
            "id": "shop",
            "args": {"b": 1, "a": [2]},
            "server": {"tool_deadline_s": 5.0, "workers": 9},
            "external": {"address": "tcp://127.0.0.1:5", "shares_payload": True},
        }
    ],
    "engine": {
        "external": {"url": "http://a:1", "fill_ids": True},
        "routes": True,
        "max_context": 100,
    },
    "payload": {"durability": "host"},
}


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    (tmp_path / "tokenizer.json").write_text("{}")
    return check({**RUN, "model": {"path": str(tmp_path)}}, "run.toml")


def server_terms(run: RunConfig, env: EnvConfig | None = None, **changes: Any) -> Terms:
    """The terms of a server that was started from the run file, with some changes."""
    env = env or run.env[0]
    served = EnvConfig(env.id, env.args, server=env.server)
    payload = changes.get("payload", ("files", run.payload.durability))
    model, engine = changes.get("model", run.model), changes.get("engine", run.engine)
    return terms_of_server(served, model, engine, changes.get("seed", run.seed), payload)


def test_a_server_of_the_same_file_agrees(run: RunConfig) -> None:
    assert disagreements(terms_of_run(run, run.env[0]), server_terms(run)) == []
    many = replace(run.env[0], server=ServerConfig(workers=1, tool_deadline_s=5.0))
    assert disagreements(terms_of_run(run, run.env[0]), server_terms(run, many)) == [], (
        "how many workers a server has is its own business"
    )


def test_a_run_that_says_nothing_takes_what_is_served(run: RunConfig) -> None:
    silent = replace(run.env[0], args={}, server=None)
    assert disagreements(terms_of_run(run, silent), server_terms(run)) == []


def test_each_disagreement_is_named(run: RunConfig, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_text("[]")
    env, model, engine = run.env[0], run.model, run.engine
    assert engine.external is not None
    expected: dict[str, Terms] = {
        "env.args": server_terms(run, replace(env, args={"a": [2]})),
        "env.server.tool_deadline_s": server_terms(run, replace(env, server=None)),
        "seed": server_terms(run, seed=4),
        "model.renderer": server_terms(run, model=replace(model, renderer="qwen3")),
        "model.template": server_terms(run, model=replace(model, template={"x": 1})),
        TOKENIZER: server_terms(run, model=replace(model, path=str(other))),
        "engine.routes": server_terms(run, engine=replace(engine, routes=False)),
        "engine.max_context": server_terms(run, engine=replace(engine, max_context=9)),
        "engine.request_deadline_s": server_terms(
            run, engine=replace(engine, request_deadline_s=9.0)
        ),
        "engine.external.fill_ids": server_terms(
            run, engine=replace(engine, external=replace(engine.external, fill_ids=False))
        ),
        "payload.store": server_terms(run, payload=("frames", "host")),
        "payload.durability": server_terms(run, payload=("files", "process")),
    }
    for key, terms in expected.items():
        (text,) = disagreements(terms_of_run(run, env), terms)
        assert text.startswith(f"'{key}' is "), text
