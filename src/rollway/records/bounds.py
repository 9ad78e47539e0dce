"""What numbers and texts of a record may be when it comes from another process."""

from typing import Annotated

from msgspec import Meta

LARGEST = 2**53
"""Whole numbers up to this are exact wherever they go, also as floats."""
Natural = Annotated[int, Meta(ge=0, le=LARGEST)]
Count = Annotated[int, Meta(ge=1, le=LARGEST)]
Label = Annotated[str, Meta(max_length=1_000)]
"""A name or a reason: something for a log line."""
ID_PATTERN = r"^[!-~]{1,200}\Z"
"""Ids are printable and without blanks, so that they can stand in a log line."""
FILE_PATTERN = r"^(?!\.)[^/\\\x00-\x1f]{0,200}\Z"
"""A file's own name: it leads to no other folder. Empty for none."""
