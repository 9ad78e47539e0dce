"""Reads a reply's body in pieces and cuts the bulk out of it before anything is parsed.

A reply is a few kilobytes of JSON around one string of up to many megabytes: the routes in base64.
The JSON parser never sees that string, and no copy of the whole body is made.
"""

KEY = b'"routed_experts"'
_MARGIN = len(KEY) + 8
"""How much of the end of a piece is looked at again with the next one: a key may be split."""


class BodyCutter:
    """Feed it pieces; `rest` becomes the JSON with an empty string where `bulk` was.

    `bulk` stays None where the field is missing or null.
    """

    def __init__(self) -> None:
        self.rest = bytearray()
        self.bulk: bytearray | None = None
        self._in_bulk = False
        self._searched = 0

    def feed(self, piece: bytes) -> None:
        if self._in_bulk:
            piece = self._take_bulk(piece)
        if piece:
            self.rest += piece
            if self.bulk is None:
                self._look_for_key()

    def _look_for_key(self) -> None:
        """Find the field and move what follows its opening quote into `bulk`."""
        at = self.rest.find(KEY, self._searched)
        if at < 0:
            self._searched = max(0, len(self.rest) - _MARGIN)
            return
        value = at + len(KEY)
        while value < len(self.rest) and self.rest[value] in b": \t\r\n":
            value += 1
        if value == len(self.rest):
            self._searched = at  # the value has not come yet
            return
        if self.rest[value] != ord('"'):
            self._searched = value  # null, or something the parser will refuse
            return
        tail = bytes(self.rest[value + 1 :])
        del self.rest[value + 1 :]
        self.bulk, self._in_bulk = bytearray(), True
        self.feed(tail)

    def _take_bulk(self, piece: bytes) -> bytes:
        """Move the piece up to the closing quote; returns what follows, from that quote on."""
        assert self.bulk is not None
        end = piece.find(b'"')
        if end < 0:
            self.bulk += piece
            return b""
        self.bulk += piece[:end]
        self._in_bulk = False
        return piece[end:]
