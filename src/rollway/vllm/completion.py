"""Draws completions straight from vLLM's engine, which returns token ids and arrays. vLLM's own server
would turn these into text, base64 and JSON, at more CPU time and a third more bytes."""

from typing import Any

import msgspec
from msgspec import Struct
from numpy.typing import NDArray

from .binary_reply import encode_reply

FINISH_REASONS = ("stop", "length", "abort")
LOWEST = -9999.0
"""vLLM's own server writes this for the logprob minus infinity."""


class CompletionOrder(Struct, frozen=True, forbid_unknown_fields=True):
    """A request as rollway sends it."""

    model: str
    prompt: list[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    logprobs: int
    return_token_ids: bool
    routed_experts_prompt_start: int
    stop_token_ids: list[int]
    ignore_eos: bool = False
    seed: int | None = None
    cache_salt: str | None = None


_orders = msgspec.json.Decoder(CompletionOrder)


def parse_order(body: bytes | bytearray, server: Any) -> CompletionOrder | None:
    """Read a request. None means that vLLM's own server must answer it: because it asks for something
    else, or because it is wrong, and that server says best what is wrong."""
    try:
        order = _orders.decode(body)
    except msgspec.DecodeError:
        return None
    num_tokens = len(order.prompt) + order.max_tokens
    is_plain = order.prompt and order.logprobs == 0 and order.return_token_ids
    fits = num_tokens <= server.model_config.max_model_len
    return order if is_plain and fits and server.models.is_base_model(order.model) else None


async def draw(server: Any, order: CompletionOrder, name: str) -> Any:
    """Return vLLM's output for a request that it knows by `name`. `server` is vLLM's own server of
    completions. The request is aborted if this is cancelled."""
    from vllm.inputs.engine import tokens_input  # type: ignore[import-not-found]
    from vllm.sampling_params import (  # type: ignore[import-not-found]
        RequestOutputKind,
        SamplingParams,
    )

    default_stops = server.default_sampling_params.get("stop_token_ids") or []
    params = SamplingParams(
        max_tokens=order.max_tokens,
        temperature=order.temperature,
        top_p=order.top_p,
        top_k=order.top_k,
        min_p=order.min_p,
        repetition_penalty=order.repetition_penalty,
        seed=order.seed,
        stop_token_ids=[*order.stop_token_ids, *default_stops],
        ignore_eos=order.ignore_eos,
        logprobs=order.logprobs,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        routed_experts_prompt_start=order.routed_experts_prompt_start,
    )
    prompt = tokens_input(order.prompt, cache_salt=order.cache_salt)
    async for result in server.engine_client.generate(prompt, params, name):
        output = result.outputs[0]
    if output.finish_reason not in FINISH_REASONS:
        raise RuntimeError(f"vLLM ended a request with '{output.finish_reason}'")
    return output


def encode_output(output: Any, versions: NDArray[Any] | None) -> bytes:
    found = zip(output.token_ids, output.logprobs, strict=True)
    logprobs = [max(top[token_id].logprob, LOWEST) for token_id, top in found]
    routes = output.routed_experts
    return encode_reply(output.token_ids, logprobs, versions, output.finish_reason, routes)
