"""Numbers that user code returns, as rewards or advantages: finite, and one for each rollout."""

import math
from collections.abc import Iterable
from typing import Any


def finite_number(source: str, value: Any, which: str = "") -> float:
    """Return the value as a float, or raise TypeError or ValueError that names `source`."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{source} returned {value!r}{which}, not a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{source} returned {number}{which}, not a finite number")
    return number


def one_for_each(source: str, values: Any, count: int, noun: str) -> list[float]:
    """Return one finite number for each of `count` rollouts, or raise an error that names `source`."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise TypeError(f"{source} returned a {type(values).__name__}, not a list of numbers")
    numbers = [
        finite_number(source, value, f" for rollout {index}")
        for index, value in enumerate(values)
    ]
    if len(numbers) != count:
        raise ValueError(f"{source} returned {len(numbers)} {noun} for {count} rollouts")
    return numbers
