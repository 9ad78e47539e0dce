"""Reading the load from the metrics of vLLM and SGLang, and the version from an engine's answer."""

import pytest

from rollway.inference.engines.sglang import Sglang
from rollway.inference.engines.status import (
    LoadGauges,
    is_at_least,
    parse_load,
    parse_version,
    sum_loads,
)
from rollway.inference.engines.vllm import Vllm
from rollway.records.engine import EngineLoad

VLLM = b"""# HELP python_gc_objects_collected_total Objects collected during gc
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 11512.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="Qwen/Qwen3-8B"} 17.0
vllm:num_requests_running{engine="1",model_name="Qwen/Qwen3-8B"} 14.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="Qwen/Qwen3-8B"} 4.0
vllm:num_requests_waiting{engine="1",model_name="Qwen/Qwen3-8B"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="Qwen/Qwen3-8B",reason="capacity"} 4.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="Qwen/Qwen3-8B"} 0.9375
vllm:kv_cache_usage_perc{engine="1",model_name="Qwen/Qwen3-8B"} 0.25
vllm:generation_tokens_total{engine="0",model_name="Qwen/Qwen3-8B"} 1.6453e+04"""

SGLANG = b"""sglang:token_usage{model_name="meta-llama/Llama-3.1-8B-Instruct"} 0.28
sglang:num_running_reqs{model_name="a } b"} 162.0 1700000000
sglang:num_queue_reqs{model_name="a } b"} 2826.0
sglang:num_running_reqs_offline_batch{model_name="a } b"} 5.0
"""


def test_the_loads_of_an_engines_ranks_are_added_up() -> None:
    assert parse_load(VLLM, Vllm.gauges) == EngineLoad(
        running=31, waiting=4, cache_use=0.9375
    )
    assert parse_load(bytearray(SGLANG), Sglang.gauges) == EngineLoad(162, 2826, 0.28)


@pytest.mark.parametrize("text", [b"", b"{}", SGLANG, b"vllm:num_requests_running 1.0\n"])
def test_metrics_without_a_load_give_none(text: bytes) -> None:
    assert parse_load(text, Vllm.gauges) is None


def test_values_that_are_not_finite_do_not_count() -> None:
    assert parse_load(VLLM.replace(b" 4.0", b" NaN"), Vllm.gauges) == EngineLoad(
        31, 0, 0.9375
    )


@pytest.mark.parametrize("line", [b"run", b"run ", b"run{a=", b"run x", b"run -", b"run inf"])
def test_broken_lines_are_skipped(line: bytes) -> None:
    names = LoadGauges(b"run", b"wait", b"cache")
    assert parse_load(line + b"\nrun 2\nwait 1 \ncache 0.5", names) == EngineLoad(2, 1, 0.5)


def test_the_loads_of_several_engines_are_added_up() -> None:
    assert sum_loads([]) is None
    loads = [EngineLoad(3, 1, 0.5), EngineLoad(4, 0, 0.75)]
    assert sum_loads(loads) == EngineLoad(7, 1, 0.75)


@pytest.mark.parametrize(
    ("body", "version"),
    [
        (b'{"weight_version": "7"}', "7"),
        (b'{"model_path": "m", "weight_version": 7}', "7"),
        (b'{"weight_version": null}', ""),
        (b'{"data": []}', ""),
        (b"[]", ""),
        (b"<html>", ""),
    ],
)
def test_the_version_is_read_from_an_answer(body: bytes, version: str) -> None:
    assert parse_version(body) == version


def test_a_reported_version_is_compared_with_a_wanted_one() -> None:
    assert is_at_least("7", 7)
    assert is_at_least("8", 7)
    assert not is_at_least("default", 0), "no one has checked what it was started with"
    assert not is_at_least("6", 7)
    assert not is_at_least("default", 7)
    assert not is_at_least("v8", 7)
