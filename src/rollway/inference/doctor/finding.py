"""One line of what `rollway doctor` found."""

from typing import Literal

from msgspec import Struct

Verdict = Literal["ok", "note", "wrong"]


class Finding(Struct, frozen=True):
    """`wrong` means that training on the engine would be wrong, `note` that something is missing which
    training does not need."""

    subject: str
    verdict: Verdict
    text: str


def ok(subject: str, text: str) -> Finding:
    return Finding(subject, "ok", text)


def note(subject: str, text: str) -> Finding:
    return Finding(subject, "note", text)


def wrong(subject: str, text: str) -> Finding:
    return Finding(subject, "wrong", text)
