"""Limits of a rollout, its children included."""

from .rollout import Reply


class TurnLimits:
    """Counts turns and sampled tokens. None stands for no limit."""

    def __init__(self, max_turns: int | None = None, max_rollout_tokens: int | None = None) -> None:
        self._max_turns = max_turns
        self._max_rollout_tokens = max_rollout_tokens
        self.num_turns = 0
        self.num_tokens = 0

    def count(self, reply: Reply) -> None:
        self.num_turns += 1
        self.num_tokens += reply.num_tokens

    def reached(self) -> str:
        """Return the name of a limit that is reached, or an empty string."""
        if self._max_turns is not None and self.num_turns >= self._max_turns:
            return "max_turns"
        if self._max_rollout_tokens is not None and self.num_tokens >= self._max_rollout_tokens:
            return "max_rollout_tokens"
        return ""
