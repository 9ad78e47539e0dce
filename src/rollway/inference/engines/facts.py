"""What a vLLM or SGLang server tells about itself, and which settings cannot train rightly. Pure."""

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from ...errors import UNREADABLE
from ..http.endpoint import ServedModel
from ..http.framing import Bytes

EXTENSION = "rollway.vllm.WorkerExtension"
MIDDLEWARE = "rollway.vllm.Middleware"
"""The classes that the plug-in is loaded by."""
SAMPLED_LOGPROBS = "processed_logprobs"
"""The mode in which logprobs are those of the distribution that tokens are drawn from."""


class _Model(Struct, frozen=True):
    dtype: str = ""
    logprobs_mode: str = SAMPLED_LOGPROBS
    enforce_eager: bool = True
    enable_return_routed_experts: bool = True


class _Parallel(Struct, frozen=True):
    worker_extension_cls: str = ""


class _Device(Struct, frozen=True):
    device: str | None = None


class _Cache(Struct, frozen=True):
    enable_prefix_caching: bool | None = None


class _Config(Struct, frozen=True):
    cache_config: _Cache = _Cache()
    lora_config: dict[str, Any] | None = None
    model_config: _Model = _Model()
    parallel_config: _Parallel = _Parallel()
    device_config: _Device = _Device()


class _ServerInfo(Struct, frozen=True):
    vllm_config: _Config


class _SglangServer(Struct, frozen=True):
    """The arguments of an SGLang server, as its documentation names them."""

    enable_return_routed_experts: bool
    dtype: str = ""
    disable_radix_cache: bool = False
    enable_lora: bool | None = None


class EngineFacts(Struct, frozen=True):
    dtype: str
    """The number format that it computes in; empty if it does not say."""
    logprobs_mode: str
    is_eager: bool
    returns_routes: bool
    is_on_cpu: bool
    has_plugin: bool
    caches_prefixes: bool
    takes_adapters: bool


def parse_facts(body: Bytes) -> EngineFacts | None:
    """Read the answer of `/server_info`; None if it is neither vLLM's nor SGLang's."""
    try:
        config = msgspec.json.decode(body, type=_ServerInfo).vllm_config
    except UNREADABLE:
        return _parse_sglang(body)
    model = config.model_config
    return EngineFacts(
        dtype=model.dtype.removeprefix("torch."),
        logprobs_mode=model.logprobs_mode,
        is_eager=model.enforce_eager,
        returns_routes=model.enable_return_routed_experts,
        is_on_cpu=config.device_config.device == "cpu",
        has_plugin=config.parallel_config.worker_extension_cls == EXTENSION,
        caches_prefixes=bool(config.cache_config.enable_prefix_caching),
        takes_adapters=config.lora_config is not None,
    )


def _parse_sglang(body: Bytes) -> EngineFacts | None:
    try:
        server = msgspec.json.decode(body, type=_SglangServer)
    except UNREADABLE:
        return None
    return EngineFacts(
        dtype=server.dtype,
        logprobs_mode=SAMPLED_LOGPROBS,
        is_eager=False,
        returns_routes=server.enable_return_routed_experts,
        is_on_cpu=False,
        has_plugin=False,
        caches_prefixes=not server.disable_radix_cache,
        takes_adapters=bool(server.enable_lora),
    )


def problems(
    served: ServedModel, facts: EngineFacts | None, *, wants_routes: bool, temperature: float
) -> Iterator[str]:
    """Yield what about an engine would make training wrong, each with its remedy."""
    if served.parent is not None:
        yield (
            f"it serves '{served.id}' as an adapter of '{served.parent}', and new weights would go to "
            "the latter: name the model itself (engine.external.model)"
        )
    if facts is None:
        if served.owned_by == "vllm":
            yield (
                "it cannot load new weights, because its development mode is off: start vLLM with "
                "VLLM_SERVER_DEV_MODE=1 in its environment"
            )
        return
    if facts.logprobs_mode != SAMPLED_LOGPROBS and temperature != 1:
        yield (
            f"its logprobs are '{facts.logprobs_mode}', not those of the distribution that it draws "
            f"from at temperature {temperature:g}: start vLLM with --logprobs-mode {SAMPLED_LOGPROBS}"
        )
    if wants_routes and not facts.returns_routes:
        yield (
            "it does not return routes: start it with --enable-return-routed-experts, or set "
            "engine.routes = false to train without them"
        )
    elif wants_routes and facts.is_on_cpu and not facts.is_eager:
        yield "compiled on CPU, it returns routes that are all zero: start vLLM with --enforce-eager"
