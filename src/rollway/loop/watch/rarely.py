"""What happens again and again is said at first, then ever more seldom."""


def is_news(before: int, now: int) -> bool:
    """Whether a count that went from `before` to `now` passed 1, 2, 4, 8, …: worth a line."""
    return now.bit_length() > before.bit_length()
