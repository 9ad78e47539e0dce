"""The transcript of a rollout as JSON, for people who want to read it."""

from collections.abc import Generator, Sequence

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ...records.task import Message

SLICE_CHARS = 256 << 10
"""Text that is encoded at a time: a part of a millisecond."""
EMPTY = b'"content":""'


def transcript(
    messages: Sequence[Message],
) -> Generator[None, None, list[NDArray[np.uint8]]]:
    """Encode messages, and yield now and then: a tool may have said megabytes."""
    parts, separator = [], b"["
    for message in messages:
        parts.append(separator)
        if len(message.content) <= SLICE_CHARS:
            parts.append(msgspec.json.encode(message))
        else:
            head, _, tail = msgspec.json.encode(replace(message, content="")).partition(EMPTY)
            parts.append(head + EMPTY[:-1])
            for start in range(0, len(message.content), SLICE_CHARS):
                text = message.content[start : start + SLICE_CHARS]
                parts.append(msgspec.json.encode(text)[1:-1])
                yield
            parts.append(b'"' + tail)
        separator = b","
        yield
    parts.append(b"]" if messages else b"[]")
    return _joined(parts)


def _joined(parts: Sequence[bytes]) -> list[NDArray[np.uint8]]:
    """Join short parts, so that there are few chunks, and leave the long ones as they are."""
    chunks: list[bytes] = []
    short: list[bytes] = []
    for part in parts:
        if len(part) < SLICE_CHARS:
            short.append(part)
            continue
        chunks += [b"".join(short), part]
        short.clear()
    chunks.append(b"".join(short))
    return [np.frombuffer(chunk, np.uint8) for chunk in chunks if chunk]
