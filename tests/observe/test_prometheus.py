"""Prometheus scrapes a run over HTTP."""

import socket

import aiohttp
import msgspec
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.observe.test_console import VIEW

from rollway.config.sections import PrometheusConfig
from rollway.errors import PortError
from rollway.observe.declared import DECLARED
from rollway.observe.prometheus import PrometheusExporter, exported_name, serve_metrics
from rollway.observe.report import StepDone
from rollway.records.lag import LagStats, ProcessStats, Stall

pytestmark = pytest.mark.anyio

STALL = Stall("env.py:9", "rollout", 2, 0.5, 0.25)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


async def scrape(port: int) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}/metrics") as response,
    ):
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/plain; version=")
        text = await response.text()
    families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples]
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value for sample in samples
    }


async def test_a_run_is_scraped() -> None:
    exporter, port = PrometheusExporter(), free_port()
    async with serve_metrics(PrometheusConfig(port=port), exporter.render):
        for _ in range(3):
            exporter.on_stats(
                ProcessStats("envs.w0", LagStats(p99=0.004, max=0.5), 1 << 20, 7, (STALL,))
            )
        exporter.on_progress(msgspec.structs.replace(VIEW, is_held_back=True))
        exporter.on_step(
            StepDone(3, {"reward/all/mean": 0.25, "reward/exact/mean": 0.5, "errors/env": 2,
                         "errors/cancelled": 1, "time/ship": 0.125, "in_flight": 99}, {})
        )  # fmt: skip
        scraped = await scrape(port)
    worker = ("process", "envs.w0")
    expected = {
        ("rollway_event_loop_lag_seconds", frozenset([worker, ("stat", "p99")])): 0.004,
        ("rollway_event_loop_lag_seconds", frozenset([worker, ("stat", "max")])): 0.5,
        ("rollway_rss_bytes", frozenset([worker])): 1 << 20,
        ("rollway_process_in_flight", frozenset([worker])): 7,
        ("rollway_stalls_total", frozenset([worker])): 6,
        ("rollway_stalls_seconds_total", frozenset([worker])): 1.5,
        ("rollway_in_flight", frozenset()): 5,
        ("rollway_payload_live_bytes", frozenset()): 1_500_000,
        ("rollway_payload_held_back", frozenset()): 1,
        ("rollway_reward_all_mean", frozenset()): 0.25,
        ("rollway_reward_mean", frozenset([("reward", "exact")])): 0.5,
        ("rollway_errors", frozenset([("boundary", "env")])): 2,
        ("rollway_errors_cancelled", frozenset()): 1,
        ("rollway_time_ship_seconds", frozenset()): 0.125,
    }
    assert {key: scraped.get(key) for key in expected} == expected


async def test_a_label_that_the_last_step_lacks_disappears() -> None:
    exporter, port = PrometheusExporter(), free_port()
    async with serve_metrics(PrometheusConfig(port=port), exporter.render):
        exporter.on_step(
            StepDone(1, {"stop/found": 0.5, "stop/length": 0.5, "loss": 1.0}, {})
        )
        exporter.on_step(StepDone(2, {"stop/length": 1.0, "loss": 2.0}, {}))
        scraped = await scrape(port)
    stops = {key: value for key, value in scraped.items() if key[0] == "rollway_stop_ratio"}
    assert stops == {("rollway_stop_ratio", frozenset([("condition", "length")])): 1.0}
    assert scraped["rollway_loss", frozenset()] == 2.0


def test_exported_names_are_unique_and_carry_their_unit() -> None:
    names = [
        exported_name(metric)
        for metric in DECLARED
        if metric.is_exported and not metric.is_summed
    ]
    assert len(names) == len(set(names))
    assert all(name.replace("_", "").isalnum() for name in names)
    for metric in DECLARED:
        if metric.unit == "s":
            assert exported_name(metric).endswith("_seconds")


async def test_a_port_that_is_taken_names_its_key() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        with pytest.raises(
            PortError, match=rf"metrics\.prometheus\.port\' = {port} cannot be bound"
        ):
            async with serve_metrics(PrometheusConfig(port=port), lambda: b""):
                pass


async def test_without_its_section_nothing_is_served() -> None:
    def open_ports() -> set[int]:
        connections = psutil.Process().net_connections("tcp")
        return {sock.laddr.port for sock in connections if sock.status == psutil.CONN_LISTEN}

    before = open_ports()
    async with serve_metrics(None, lambda: b""):
        assert open_ports() == before
    port = free_port()
    async with serve_metrics(PrometheusConfig(port=port), lambda: b""):
        assert open_ports() == before | {port}
