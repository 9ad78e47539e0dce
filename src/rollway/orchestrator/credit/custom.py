"""What an advantage function of the user's must give back."""

import math
from typing import Any


def checked(given: Any, count: int) -> tuple[float, ...]:
    """One finite number for each of `count` rollouts, or an error that says what is wrong."""
    if isinstance(given, str | bytes) or not hasattr(given, "__iter__"):
        raise TypeError(f"returned a {type(given).__name__}, not a list of numbers")
    values = tuple(float(one) for one in given)
    if len(values) != count:
        raise ValueError(f"returned {len(values)} advantages for {count} rollouts")
    for at, value in enumerate(values):
        if not math.isfinite(value):
            raise ValueError(f"returned {value} for rollout {at}")
    return values
