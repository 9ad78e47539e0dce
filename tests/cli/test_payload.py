"""`rollway payload` as a user calls it."""

import asyncio
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from tests.doubles.command import Rollway

from rollway.payload.blob import build, row_columns
from rollway.payload.writer import SegmentWriter
from rollway.records.payload import PayloadRef, SegmentName


@pytest.fixture
def payload(rollway: Rollway) -> Rollway:
    return partial(rollway, "payload")


@pytest.fixture
def refs(tmp_path: Path) -> list[PayloadRef]:
    """Two rollouts of two rows each."""

    async def write() -> list[PayloadRef]:
        with SegmentWriter(tmp_path, SegmentName("w", 0), 1 << 20) as writer:
            return [await writer.append(build(rollout(n))) for n in (3, 5)]

    return asyncio.run(write())


def rollout(n: int) -> dict[str, object]:
    row = {
        "token_ids": [np.arange(n, dtype=np.int32)],
        "routes": [np.ones((n, 2, 2), np.uint8)],
    }
    return {**row_columns([row, row]), "transcript": [np.zeros(9, np.uint8)]}  # type: ignore[list-item]


def test_show_lists_blobs_rows_and_columns(
    tmp_path: Path, refs: list[PayloadRef], payload: Rollway
) -> None:
    path = tmp_path / refs[0].segment
    for shown in (payload("show", path, "--verify"), payload("show", tmp_path, "--verify")):
        lines = shown.out.splitlines()
        assert shown.code == 0, shown.err
        assert lines[0] == f"{path}: {path.stat().st_size} bytes, 2 blobs"
        at, length = refs[1].offset, refs[1].length
        assert f"  at {at}, {length} bytes: 2 rows, 10 tokens, checksum ok" in lines
        assert "    row1: routes U8[5, 2, 2] token_ids I32[5]" in lines
        assert "    transcript U8[9]" in lines
        assert lines[-1].startswith(
            "In all: 1 segments (none damaged), 2 blobs, 16 tokens, 0.0 MB"
        )


def test_a_torn_tail_is_shown_and_recovered(
    tmp_path: Path, refs: list[PayloadRef], payload: Rollway
) -> None:
    path = tmp_path / refs[0].segment
    with path.open("rb+") as file:
        file.truncate(refs[1].offset + 20)
    shown = payload("show", path)
    assert shown.code == 1
    assert f"torn tail at {refs[1].offset}, 20 bytes" in shown.out
    recovered = payload("recover", path)
    assert recovered.code == 0, recovered.err
    assert "1 whole blobs kept" in recovered.out
    assert payload("show", path, "--verify").code == 0


def test_verify_finds_damage(
    tmp_path: Path, refs: list[PayloadRef], payload: Rollway
) -> None:
    path = tmp_path / refs[0].segment
    raw = bytearray(path.read_bytes())
    raw[refs[0].length - 1] ^= 1
    path.write_bytes(raw)
    assert payload("show", path).code == 0
    shown = payload("show", path, "--verify")
    assert shown.code == 1
    assert "broken at 0," in shown.out
    assert "checksum" in shown.out
    refused = payload("extract", path, 0, "-o", tmp_path / "one.safetensors")
    assert refused.code == 1
    assert "rollway: the blob at offset 0" in refused.err
    assert not (tmp_path / "one.safetensors").exists()


@pytest.mark.anyio
async def test_the_tail_of_a_live_segment_is_not_called_torn(
    tmp_path: Path, payload: Rollway
) -> None:
    with SegmentWriter(tmp_path, SegmentName("v", 0), 1 << 20) as writer:
        ref = await writer.append(build(rollout(3)))
        with (tmp_path / ref.segment).open("ab") as file:
            file.write(bytes(300))
        shown = payload("show", tmp_path)
        assert shown.code == 0, shown.out
        assert ", in use" in shown.out
        assert "unfinished at" in shown.out
        assert "is in use" in payload("recover", tmp_path / ref.segment).err


def test_extract_writes_a_file_that_safetensors_opens(
    tmp_path: Path, refs: list[PayloadRef], payload: Rollway
) -> None:
    path, output = tmp_path / refs[0].segment, tmp_path / "one.safetensors"
    done = payload("extract", path, refs[1].offset, "-o", output)
    assert done.code == 0, done.err
    opened = safetensors.numpy.load_file(output)
    np.testing.assert_array_equal(opened["row1.token_ids"], np.arange(5))
    assert "exists; choose another" in payload("extract", path, 0, "-o", output).err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["show", "none.seg"], "cannot read segment none.seg"),
        (["show", "."], "no segments"),
        (["recover", "none.seg"], "cannot open segment none.seg"),
        (["extract", "none.seg", "0", "-o", "x"], "cannot read segment"),
    ],
)
def test_a_mistake_is_reported_in_one_line(
    args: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    payload: Rollway,
) -> None:
    monkeypatch.chdir(tmp_path)
    failed = payload(*args)
    assert failed.code == 1
    assert message in failed.err
    assert len(failed.err.splitlines()) == 1


def test_an_offset_without_a_blob_is_refused(
    tmp_path: Path, refs: list[PayloadRef], payload: Rollway
) -> None:
    failed = payload("extract", tmp_path / refs[0].segment, 7, "-o", tmp_path / "x")
    assert failed.code == 1
    assert "no whole blob at offset 7" in failed.err
