"""Declarations of metrics: every reported name leads to one of them, and each says what it means."""

import pytest
from tests.doubles.declared import declarations_of

from rollway.observe.declared import DECLARED, SECTIONS, Metric

EXAMPLES = {
    "reward": "exact", "metric": "length", "env": "reverse-text", "condition": "max_turns",
    "sign": "gibberish", "boundary": "engine", "phase": "queue", "process": "my-env.w0", "stat": "p99",
    "pool": "easy", "k": "4", "engine": "10.0.0.7:8000", "cause": "core",
}  # fmt: skip
UNITS = {
    "", "reward", "fraction", "rollouts", "tokens", "turns", "groups", "tasks", "versions", "version",
    "rows", "step", "s", "bytes", "nats", "tokens/s", "rollouts/s",
}  # fmt: skip


@pytest.mark.parametrize("metric", DECLARED, ids=lambda metric: metric.name)
def test_a_reported_name_leads_to_its_declaration_only(metric: Metric) -> None:
    assert declarations_of(metric.name.format(**EXAMPLES)) == [metric]


def test_a_name_that_was_never_declared_leads_nowhere() -> None:
    for name in (
        "rewards/all/mean",
        "reward/all",
        "event_loop_lag/a/b/p99",
        "filters",
        "Step",
        "",
    ):
        assert declarations_of(name) == [], name


@pytest.mark.parametrize("metric", DECLARED, ids=lambda metric: metric.name)
def test_a_declaration_has_a_unit_and_a_meaning_that_fits_a_table(metric: Metric) -> None:
    assert metric.unit in UNITS
    assert set(metric.labels) <= EXAMPLES.keys()
    assert len(metric.meaning) > 10 or metric.name == "lr"
    assert not metric.meaning.endswith((".", " "))
    assert "  " not in metric.meaning


def test_no_metric_is_declared_twice() -> None:
    names = [metric.name for section in SECTIONS.values() for metric in section]
    assert sorted(names) == sorted({metric.name for metric in DECLARED})
