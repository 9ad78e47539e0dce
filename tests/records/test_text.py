"""Texts from models, users and engines neither act on a terminal nor look like something else."""

import msgspec
import pytest

from rollway.records.rollout import Failed
from rollway.records.text import check_sendable, one_line, sendable, visible, visible_json

HOSTILE = "\x1b[2J \x9b2J \x07 \r \x7f \u202e \u2028 \udc80"
SHOWN = r"\x1b[2J \x9b2J \x07 \r \x7f \u202e \u2028 \udc80"


def test_control_characters_are_shown_as_escapes() -> None:
    assert visible(f"{HOSTILE}\n\t[/b] é 漢") == f"{SHOWN}\n\t[/b] é 漢"
    assert one_line(f"{HOSTILE}\nStep 9") == rf"{SHOWN}\nStep 9"
    assert Failed("env", "a\nStep 9", where="x\x1b").text == r"env: a\nStep 9, at x\x1b"


def test_json_has_escapes_and_the_same_values() -> None:
    value = {"key\x85": f"{sendable(HOSTILE)}\n\t\\x9b é"}
    shown = visible_json(msgspec.json.encode(value))
    assert shown.isprintable()
    assert "é" in shown
    assert msgspec.json.decode(shown) == value


def test_texts_without_an_encoding_are_found() -> None:
    assert sendable("a\udc80") == r"a\udc80"
    with pytest.raises(ValueError, match="a lone surrogate at character 1"):
        check_sendable("a\udc80")
    check_sendable("é 漢")
