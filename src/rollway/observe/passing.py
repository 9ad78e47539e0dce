"""pass@k: the chance that one of k rollouts of a task passes."""

from math import comb


def pass_at(k: int, num_samples: int, num_passed: int) -> float:
    """The chance that one of k samples passes, if they are drawn from these without putting back: of
    pass@k the estimate without bias."""
    return 1 - comb(num_samples - num_passed, k) / comb(num_samples, k)


def powers_of_two(limit: int) -> list[int]:
    return [1 << n for n in range(limit.bit_length()) if 1 << n <= limit]
