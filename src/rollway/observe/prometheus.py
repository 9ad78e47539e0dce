"""Serves the declared metrics of a run to Prometheus."""

import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from msgspec import Struct
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    generate_latest,
)

from ..config.sections import PrometheusConfig
from ..loop.processes.port import bind_port, serve_app
from ..records.lag import ProcessStats
from ..records.situation import CoreView
from .declared import DECLARED, LABEL, Metric
from .report import EvalDone, StepDone
from .step_metrics import lag_metrics, late_metrics, stall_metrics

UNITS = {"s": "seconds", "bytes": "bytes", "fraction": "ratio"}


def exported_name(metric: Metric) -> str:
    """Return the name in Prometheus: `event_loop_lag/{process}/{stat}`, in seconds, is
    `rollway_event_loop_lag_seconds`."""
    dropped = ("", "count", "seconds") if metric.is_summed else ("",)
    words = [LABEL.sub("", word).rstrip("@") for word in metric.name.split("/")]
    words = [word for word in words if word not in dropped]
    unit = UNITS.get(metric.unit, "")
    if unit and not words[-1].endswith(unit):
        words.append(unit)
    return re.sub(r"\W", "_", "_".join(["rollway", *words]))


class _Exported(Struct, frozen=True):
    pattern: re.Pattern[str]
    collector: Gauge | Counter

    def clear_labels(self) -> None:
        """Remove the values of all labels; a metric without labels keeps its value."""
        if self.pattern.groupindex:
            self.collector.clear()

    def add(self, name: str, value: float) -> bool:
        """Take the value and return True if the name belongs to this metric."""
        found = self.pattern.fullmatch(name)
        if found is None:
            return False
        labels = found.groupdict()
        series = self.collector.labels(**labels) if labels else self.collector
        if isinstance(series, Counter):
            series.inc(value)
        else:
            series.set(value)
        return True


class PrometheusExporter:
    """Holds the latest value of every metric. Live metrics come once a second and not from steps."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        exported = [metric for metric in DECLARED if metric.is_exported]
        exported.sort(key=lambda metric: len(metric.labels))  # a plain name wins over a label
        live = [metric for metric in exported if metric.is_live]
        by_eval = [metric for metric in exported if metric.name.startswith("eval/")]
        by_step = [metric for metric in exported if metric not in (*live, *by_eval)]
        self._live = list(map(self._export, live))
        self._by_eval = list(map(self._export, by_eval))
        self._by_step = list(map(self._export, by_step))

    def _export(self, metric: Metric) -> _Exported:
        kind, name = Counter if metric.is_summed else Gauge, exported_name(metric)
        collector = kind(name, metric.meaning, metric.labels, registry=self._registry)
        return _Exported(metric.pattern, collector)

    def on_stats(self, stats: ProcessStats) -> None:
        process = stats.process
        self._set(self._live, {
            **lag_metrics({process: stats.lag}),
            f"rss/{process}": stats.rss_bytes,
            **{f"rss/{child}": rss for child, rss in stats.children.items()},
            f"process_in_flight/{process}": stats.in_flight,
            **stall_metrics({process: stats.stalls}),
            **late_metrics({process: stats.waits}),
        })  # fmt: skip

    def on_progress(self, core: CoreView) -> None:
        self._set(self._live, {
            "in_flight": core.in_flight,
            "ready": core.ready,
            "payload/live_bytes": core.live_bytes,
            "payload/held_back": float(core.is_held_back),
        })  # fmt: skip

    def on_step(self, done: StepDone) -> None:
        """Show this step's values. A label that only the previous step had disappears."""
        for exported in self._by_step:
            exported.clear_labels()
        self._set(self._by_step, done.metrics)

    def on_eval(self, done: EvalDone) -> None:
        self._set(self._by_eval, done.metrics)

    def _set(self, exported: list[_Exported], values: Mapping[str, float]) -> None:
        for name, value in values.items():
            for metric in exported:
                if metric.add(name, value):
                    break

    def render(self) -> bytes:
        return generate_latest(self._registry)


@asynccontextmanager
async def serve_metrics(
    config: PrometheusConfig | None, render: Callable[[], bytes]
) -> AsyncIterator[None]:
    """Serve `/metrics` if the run file asks for it. Rendering metrics of 20 processes takes 1 ms."""
    if config is None:
        yield
        return

    from aiohttp import web  # only here, because it takes long to import

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=render(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    sock = bind_port("metrics.prometheus.port", config.host, config.port)
    async with serve_app(app, sock):
        yield
