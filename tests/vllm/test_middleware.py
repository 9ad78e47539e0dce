"""vLLM's plug-in in front of an app: which requests pass, and what it takes from them. How it draws
replies is tested with a real vLLM (`make test-vllm`)."""

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from rollway.config.sections import ENGINE_KEY_VAR
from rollway.inference.engines.dialect import make_prompt
from rollway.inference.engines.vllm import Vllm
from rollway.records.turn import Sampling
from rollway.vllm.binary_reply import SAFETENSORS
from rollway.vllm.completion import parse_order
from rollway.vllm.middleware import KEY_VAR, Middleware

pytestmark = pytest.mark.anyio
BINARY = {"accept": f"{SAFETENSORS}, application/json;q=0.9"}
REPLY = b'{"id": "cmpl-1", "choices": []}'
SERVER = SimpleNamespace(
    model_config=SimpleNamespace(max_model_len=100),
    models=SimpleNamespace(is_base_model=lambda name: name == "policy"),
)


class Client:
    """Sends requests through the middleware to an app that answers with `reply`, in two parts."""

    def __init__(self, reply: bytes = REPLY) -> None:
        self.reply = reply
        self.asked = b""
        """The body that reached the app."""
        self.middleware = Middleware(self._app)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked = (await receive())["body"]
        head = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": self.reply[:9], "more_body": True})
        await send({"type": "http.response.body", "body": self.reply[9:]})

    async def ask(self, path: str, body: bytes = b"{}", **headers: str) -> tuple[int, bytes]:
        parts, sent = [body[:1], body[1:]], []

        async def receive() -> dict[str, Any]:
            part = parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(parts)}

        async def send(message: Any) -> None:
            sent.append(message)

        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "path": path, "headers": pairs}
        await self.middleware(scope, receive, send)
        return sent[0]["status"], b"".join(message["body"] for message in sent[1:])


async def test_what_the_plugin_cannot_answer_reaches_the_server_unchanged() -> None:
    client = Client()
    assert await client.ask("/v1/completions", b'{"n": 2}', **BINARY) == (200, REPLY)
    assert client.asked == b'{"n": 2}'


def order(**changes: Any) -> bytes:
    """The request that rollway's own client sends, with changes."""
    prompt = make_prompt(np.arange(40, dtype=np.int32))
    body = Vllm().encode_request("policy", prompt, Sampling(60, 0.7), [3, 4], 12, "5")
    return msgspec.json.encode({**json.loads(body), **changes})


def test_the_requests_of_the_client_are_understood() -> None:
    found = parse_order(order(), SERVER)
    assert found is not None
    assert (found.prompt, found.max_tokens, found.temperature) == ([*range(40)], 60, 0.7)
    assert (found.routed_experts_prompt_start, found.cache_salt) == (12, "5")
    assert found.stop_token_ids == [3, 4]


@pytest.mark.parametrize(
    "changes",
    [{"max_tokens": 61}, {"model": "an adapter"}, {"prompt": []}, {"prompt": "text"}, {"logprobs": 5},
     {"return_token_ids": False}, {"n": 2}, {"stream": True}, {"prompt": [[1], [2]]}],
    ids=str,
)  # fmt: skip
def test_other_requests_are_left_to_the_server(changes: dict[str, Any]) -> None:
    assert parse_order(order(**changes), SERVER) is None


async def test_a_load_is_noted_and_its_answer_passes_unchanged() -> None:
    loaded = {"version": "7", "drawn": {}}
    reply = json.dumps({"results": [loaded]}).encode()
    client = Client(reply)
    assert await client.ask("/collective_rpc") == (200, reply)
    versions = client.middleware._versions
    found = versions.end(versions.begin(), 2)
    assert found is not None
    assert found.tolist() == [7, 7]


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/pause", "/collective_rpc", "/v1/models"]
)
async def test_a_key_is_demanded(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VAR, "secret")
    client = Client()
    assert (await client.ask(path))[0] == 401
    assert (await client.ask(path, authorization="Bearer wrong"))[0] == 401
    assert (await client.ask(path, authorization="Bearer secret"))[0] == 200


async def test_health_and_metrics_need_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VAR, "secret")
    assert (await Client().ask("/health"))[0] == 200
    assert (await Client().ask("/metrics"))[0] == 200


def test_plugin_and_runs_agree_on_the_variable_of_the_key() -> None:
    assert KEY_VAR == ENGINE_KEY_VAR
