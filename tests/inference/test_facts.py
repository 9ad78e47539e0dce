"""What a vLLM or SGLang server tells about itself, and which settings are refused."""

import json
from typing import Any

import pytest

from rollway.inference.engines.facts import EXTENSION, parse_facts, problems
from rollway.inference.http.endpoint import ServedModel

VLLM = ServedModel("m", "vllm")


def server_info(
    device: str | None = "cuda", extension: str = "", lora: Any = None, **model: Any
) -> bytes:
    """What `/server_info?config_format=json` of vLLM 0.30 says, shortened."""
    settings = {
        "dtype": "torch.bfloat16",
        "logprobs_mode": "processed_logprobs",
        "enforce_eager": False,
        "enable_return_routed_experts": True,
        **model,
    }
    config = {
        "model_config": settings,
        "parallel_config": {"worker_extension_cls": extension},
        "device_config": {"device": device},
        "cache_config": {"block_size": 16},
        "lora_config": lora,
    }
    return json.dumps({"vllm_config": config, "vllm_env": {}, "system_env": {}}).encode()


def refusals(
    body: bytes, served: ServedModel = VLLM, *, routes: bool = True, temperature: float = 1.0
) -> list[str]:
    facts = parse_facts(body)
    return list(problems(served, facts, wants_routes=routes, temperature=temperature))


def test_the_settings_of_a_server_are_read() -> None:
    facts = parse_facts(server_info("cpu", EXTENSION))
    assert facts is not None
    assert (facts.dtype, facts.is_on_cpu, facts.has_plugin) == ("bfloat16", True, True)
    assert not facts.takes_adapters
    assert not parse_facts(server_info()).has_plugin  # type: ignore[union-attr]
    facts = parse_facts(server_info(None, lora={"max_loras": 1}))
    assert facts is not None
    assert facts.takes_adapters
    assert parse_facts(b"") is None
    assert parse_facts(b"<html>") is None


def test_the_arguments_of_an_sglang_server_are_read() -> None:
    served = ServedModel("m", "sglang")
    body = {"model_path": "/m", "dtype": "float16", "disable_radix_cache": True}
    told = json.dumps({**body, "enable_return_routed_experts": True}).encode()
    facts = parse_facts(told)
    assert facts is not None
    assert (facts.dtype, facts.caches_prefixes, facts.returns_routes) == (
        "float16",
        False,
        True,
    )
    assert refusals(told, served, temperature=0.7) == []
    told = json.dumps({**body, "enable_return_routed_experts": False}).encode()
    (refusal,) = refusals(told, served)
    assert "--enable-return-routed-experts" in refusal


def test_a_right_setup_is_not_refused() -> None:
    assert refusals(server_info()) == []
    assert refusals(server_info("cpu", enforce_eager=True)) == []
    assert refusals(b"", ServedModel("m", "sglang")) == [], "it has no such path"


@pytest.mark.parametrize(
    ("body", "options", "text"),
    [
        (b"", {}, "VLLM_SERVER_DEV_MODE=1"),
        (server_info(logprobs_mode="raw_logprobs"), {"temperature": 0.7}, "--logprobs-mode"),
        (
            server_info(enable_return_routed_experts=False),
            {},
            "--enable-return-routed-experts",
        ),
        (server_info("cpu"), {}, "--enforce-eager"),
    ],
)
def test_a_wrong_setting_is_refused_with_the_option_to_change(
    body: bytes, options: dict[str, Any], text: str
) -> None:
    (problem,) = refusals(body, **options)
    assert text in problem


def test_settings_that_do_not_matter_are_not_refused() -> None:
    assert refusals(server_info(logprobs_mode="raw_logprobs")) == []
    assert refusals(server_info("cpu"), routes=False) == []
    assert refusals(server_info(enable_return_routed_experts=False), routes=False) == []


def test_an_adapter_is_refused() -> None:
    (problem,) = refusals(server_info(), ServedModel("tuned", "vllm", parent="base"))
    assert "serves 'tuned' as an adapter of 'base'" in problem
