"""Decides which repetitions of an event are worth a log line: the 1st, 2nd, 4th, 8th and so on."""


class Rarely:
    """Counts an event that may repeat forever, and says which times are worth a line.

    if self._bad_frames.add():
        log.warning("dropped bad frame %d", self._bad_frames.count)
    """

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> bool:
        """Count the event once more; return whether this time is worth a line."""
        return self.rise_to(self.count + 1)

    def rise_to(self, count: int) -> bool:
        """Take over a count that is kept elsewhere; return whether it passed 1, 2, 4, 8 and so on."""
        before, self.count = self.count, count
        return count.bit_length() > before.bit_length()
