"""Makes any text safe to send, and safe to show."""

import re

_HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Control characters except tab and line feed, and those that reorder or break lines."""


def sendable(text: str) -> str:
    """Return the text with escapes in place of lone surrogates, which have no encoding."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def check_sendable(text: str) -> None:
    """Raise ValueError if the text has a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text is not Unicode: a lone surrogate at character {error.start}; decode bytes with "
            "errors='replace'"
        ) from None


def visible(text: str) -> str:
    """Return the text with escapes in place of characters that a terminal acts on or does not show.
    Tabs and line feeds stay."""
    return _HIDDEN.sub(_escape, sendable(text))


def one_line(text: str) -> str:
    """Return the text as one visible line."""
    return visible(text).replace("\n", "\\n")


def visible_json(encoded: bytes) -> str:
    """Return JSON that a terminal may show, and that decodes to the same values."""
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", encoded.decode())


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
