"""What is kept of a rollout's dialogues with the policy."""

from ...envs.rollout import Reply
from ...trace.row import Row
from ...trace.trace import Trace
from .track import Track


class Record:
    """Their rows, the versions they saw, how much was drawn, how long the engine took.

    Where the engine speaks messages there are no tokens, and so no rows.
    """

    def __init__(self, track: Track | None = None) -> None:
        self.track = track or Track()
        self.trace = Trace()
        self.versions: list[int] = []
        self.num_turns = 0
        self.num_sampled = 0
        self.engine_s = 0.0
        self.stop = "no turn"

    def count(self, reply: Reply, engine_s: float) -> None:
        self.track.turned(reply.num_tokens)
        self.num_turns += 1
        self.num_sampled += reply.num_tokens
        self.engine_s += engine_s
        self.stop = reply.finish_reason

    def rows(self) -> tuple[Row, ...]:
        return self.trace.finish()
