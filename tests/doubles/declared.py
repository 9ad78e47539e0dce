"""Finds the declaration of a metric by the name that was reported."""

from rollway.observe.declared import DECLARED, Metric


def declarations_of(name: str) -> list[Metric]:
    """Return the metrics that a reported name may belong to: those with the fewest labels that match."""
    matching = [metric for metric in DECLARED if metric.pattern.fullmatch(name)]
    fewest = min((len(metric.labels) for metric in matching), default=0)
    return [metric for metric in matching if len(metric.labels) == fewest]
