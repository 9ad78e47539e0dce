"""Declarations: every reported name finds its own, and nobody else's."""

import pytest

from rollway.observe.declared import DECLARED, SECTIONS, Metric, declaration_of

EXAMPLES = {
    "reward": "exact", "metric": "length", "env": "reverse-text", "condition": "max_turns",
    "sign": "gibberish", "boundary": "engine", "phase": "queue", "process": "my-env.w0", "stat": "p99",
    "pool": "easy", "k": "4",
}  # fmt: skip


@pytest.mark.parametrize("metric", DECLARED, ids=lambda metric: metric.name)
def test_a_name_made_from_a_declaration_leads_back_to_it(metric: Metric) -> None:
    assert declaration_of(metric.name.format(**EXAMPLES)) == metric


def test_what_was_never_declared_is_nobodys() -> None:
    for name in ("rewards/all/mean", "reward/all", "event_loop_lag/a/b/p99", "filters", "Step", ""):
        assert declaration_of(name) is None, name


def test_a_declaration_is_complete_and_made_once() -> None:
    names = [metric.name for metric in DECLARED]
    assert len(names) == len(set(names))
    assert sum(len(section) for section in SECTIONS.values()) == len(DECLARED)
    for metric in DECLARED:
        assert metric.meaning, metric.name
        assert set(metric.labels) <= EXAMPLES.keys(), metric.name
