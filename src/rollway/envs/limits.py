"""How far a rollout may go, its children included."""

from .rollout import Reply


class TurnLimits:
    """Counts turns and drawn tokens; 0 is no limit."""

    def __init__(self, max_turns: int, max_tokens: int) -> None:
        self._max_turns = max_turns
        self._max_tokens = max_tokens
        self.num_turns = 0
        self.num_tokens = 0

    def count(self, reply: Reply) -> None:
        self.num_turns += 1
        self.num_tokens += reply.num_tokens

    def reached(self) -> str:
        """The name of a limit that is reached, or an empty string."""
        if 0 < self._max_turns <= self.num_turns:
            return "max_turns"
        if 0 < self._max_tokens <= self.num_tokens:
            return "max_tokens"
        return ""
