"""vLLM's plug-in: which requests pass, and which replies become binary."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from rollway.config.sections import ENGINE_KEY_VAR
from rollway.inference.replies.routes import encode_npy
from rollway.vllm.binary_reply import SAFETENSORS, convert
from rollway.vllm.middleware import KEY_VAR, Middleware

pytestmark = pytest.mark.anyio
SAMPLES = Path(__file__).parents[1] / "inference" / "data"
BINARY = {"accept": f"{SAFETENSORS}, application/json;q=0.9"}


def completion(**changes: Any) -> dict[str, Any]:
    routes = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)
    choice = {
        "index": 0,
        "text": 'a "routed_experts":"fake"',
        "logprobs": {"token_logprobs": [-0.5, -1.0]},
        "finish_reason": "stop",
        "token_ids": [7, 300_000],
        "routed_experts": encode_npy(routes),
        **changes,
    }
    return {"id": "cmpl-1", "choices": [choice], "usage": {}}


async def ask(
    reply: bytes, path: str = "/v1/completions", *, status: int = 200, kind: str = "application/json",
    **headers: str,
) -> tuple[int, dict[bytes, bytes], bytes]:  # fmt: skip
    """Send one request through the middleware to an app that answers with `reply`, in two parts."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        head = [
            (b"content-type", kind.encode()),
            (b"content-length", str(len(reply)).encode()),
        ]
        await send({"type": "http.response.start", "status": status, "headers": head})
        await send({"type": "http.response.body", "body": reply[:9], "more_body": True})
        await send({"type": "http.response.body", "body": reply[9:]})

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}"}

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await Middleware(app)({"type": "http", "path": path, "headers": pairs}, receive, send)
    body = b"".join(message["body"] for message in sent[1:])
    return sent[0]["status"], dict(sent[0]["headers"]), body


async def test_a_completion_becomes_binary_for_those_who_accept_it() -> None:
    reply = json.dumps(completion()).encode()
    _, headers, body = await ask(reply, **BINARY)
    assert headers[b"content-type"].decode() == SAFETENSORS
    assert int(headers[b"content-length"]) == len(body)
    tensors = safetensors.numpy.load(body)
    assert tensors["token_ids"].tolist() == [7, 300_000]
    assert tensors["logprobs"].tolist() == [-0.5, -1.0]
    assert bytes(tensors["finish_reason"]) == b"stop"
    assert tensors["routes"].shape == (4, 3, 2)
    assert "versions" not in tensors


@pytest.mark.parametrize(
    ("reply", "options"),
    [
        (completion(), {}),
        (completion(), {**BINARY, "path": "/v1/chat/completions"}),
        (completion(), {**BINARY, "status": 400}),
        (completion(), {**BINARY, "kind": "text/event-stream"}),
        (completion(token_ids=None), BINARY),
        (completion(logprobs=None), BINARY),
        (completion(routed_experts="not base64!"), BINARY),
        (completion(routed_experts="AAAA"), BINARY),
        ({**completion(), "prompt_routed_experts": "AAAA"}, BINARY),
        ({"id": "1", "choices": []}, BINARY),
    ],
)
async def test_everything_else_passes_unchanged(
    reply: dict[str, Any], options: dict[str, Any]
) -> None:
    text = json.dumps(reply).encode()
    status, headers, body = await ask(text, **options)
    assert body == text
    assert status == options.get("status", 200)
    assert headers[b"content-type"].decode() == options.get("kind", "application/json")
    assert int(headers[b"content-length"]) == len(text)


@pytest.mark.parametrize("name", ["vllm-0.30-completions", "vllm-0.30-completions-delta"])
def test_real_replies_of_vllm_are_smaller_when_binary(name: str) -> None:
    text = (SAMPLES / f"{name}.json").read_bytes()
    body = convert(text, lambda num_tokens: None)
    assert body is not None
    choice = json.loads(text)["choices"][0]
    assert safetensors.numpy.load(body)["token_ids"].tolist() == choice["token_ids"]
    assert len(body) < len(text)


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/pause", "/collective_rpc", "/v1/models"]
)
async def test_a_key_is_demanded(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VAR, "secret")
    assert (await ask(b"{}", path))[0] == 401
    assert (await ask(b"{}", path, authorization="Bearer wrong"))[0] == 401
    assert (await ask(b"{}", path, authorization="Bearer secret"))[0] == 200


async def test_health_and_metrics_need_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VAR, "secret")
    assert (await ask(b"{}", "/health"))[0] == 200
    assert (await ask(b"{}", "/metrics"))[0] == 200


def test_plugin_and_runs_agree_on_the_variable_of_the_key() -> None:
    assert KEY_VAR == ENGINE_KEY_VAR
