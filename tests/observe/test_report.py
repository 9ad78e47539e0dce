"""What the parts of a run tell the process that started them."""

import os

from msgspec.msgpack import encode

from rollway.observe.report import Notice, decode_report


def test_a_notice_can_be_sent_whatever_it_says() -> None:
    name = os.fsdecode(b"b\xe4d.jsonl")
    assert decode_report(encode(Notice(f"no {name}"))) == Notice(r"no b\udce4d.jsonl")
    assert decode_report(encode(Notice("€ 5"))) == Notice("€ 5")
