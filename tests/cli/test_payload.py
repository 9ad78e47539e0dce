"""`rollway payload` as a user calls it."""

import asyncio
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from rollway.payload.blob import build, row_columns
from rollway.payload.writer import SegmentWriter
from rollway.records.payload import PayloadRef


def rollway(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rollway", "payload", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def refs(tmp_path: Path) -> list[PayloadRef]:
    """Two rollouts of two rows each."""

    async def write() -> list[PayloadRef]:
        with SegmentWriter(tmp_path, "w.0", 1 << 20) as writer:
            return [await writer.append(build(rollout(n))) for n in (3, 5)]

    return asyncio.run(write())


def rollout(n: int) -> dict[str, object]:
    row = {
        "token_ids": [np.arange(n, dtype=np.int32)],
        "routes": [np.ones((n, 2, 2), np.uint8)],
    }
    return {**row_columns([row, row]), "transcript": [np.zeros(9, np.uint8)]}  # type: ignore[list-item]


def test_show_lists_blobs_rows_and_columns(tmp_path: Path, refs: list[PayloadRef]) -> None:
    path = tmp_path / refs[0].segment
    for shown in (rollway("show", path, "--verify"), rollway("show", tmp_path, "--verify")):
        lines = shown.stdout.splitlines()
        assert shown.returncode == 0, shown.stderr
        assert lines[0] == f"{path}: {path.stat().st_size} bytes, 2 blobs"
        at, length = refs[1].offset, refs[1].length
        assert f"  at {at}, {length} bytes: 2 rows, 10 tokens, checksum ok" in lines
        assert "    row1: routes U8[5, 2, 2] token_ids I32[5]" in lines
        assert "    transcript U8[9]" in lines


def test_a_torn_tail_is_shown_and_recovered(tmp_path: Path, refs: list[PayloadRef]) -> None:
    path = tmp_path / refs[0].segment
    with path.open("rb+") as file:
        file.truncate(refs[1].offset + 20)
    shown = rollway("show", path)
    assert shown.returncode == 1
    assert f"torn tail at {refs[1].offset}, 20 bytes" in shown.stdout
    recovered = rollway("recover", path)
    assert recovered.returncode == 0, recovered.stderr
    assert "1 whole blobs kept" in recovered.stdout
    assert rollway("show", path, "--verify").returncode == 0


def test_damage_is_found_by_verify(tmp_path: Path, refs: list[PayloadRef]) -> None:
    path = tmp_path / refs[0].segment
    raw = bytearray(path.read_bytes())
    raw[refs[0].length - 1] ^= 1
    path.write_bytes(raw)
    assert rollway("show", path).returncode == 0
    shown = rollway("show", path, "--verify")
    assert shown.returncode == 1
    assert "broken at 0," in shown.stdout
    assert "checksum" in shown.stdout
    refused = rollway("extract", path, 0, "-o", tmp_path / "one.safetensors")
    assert refused.returncode == 1
    assert "rollway: the blob at offset 0" in refused.stderr
    assert not (tmp_path / "one.safetensors").exists()


@pytest.mark.anyio
async def test_the_tail_of_a_live_segment_is_not_called_torn(tmp_path: Path) -> None:
    with SegmentWriter(tmp_path, "v.0", 1 << 20) as writer:
        ref = await writer.append(build(rollout(3)))
        with (tmp_path / ref.segment).open("ab") as file:
            file.write(bytes(300))
        shown = rollway("show", tmp_path)
        assert shown.returncode == 0, shown.stdout
        assert "being written" in shown.stdout
        assert "unfinished at" in shown.stdout
        assert "is being written" in rollway("recover", tmp_path / ref.segment).stderr


def test_extract_gives_a_file_safetensors_opens(tmp_path: Path, refs: list[PayloadRef]) -> None:
    path, output = tmp_path / refs[0].segment, tmp_path / "one.safetensors"
    done = rollway("extract", path, refs[1].offset, "-o", output)
    assert done.returncode == 0, done.stderr
    opened = safetensors.numpy.load_file(output)
    np.testing.assert_array_equal(opened["row1.token_ids"], np.arange(5))
    assert "exists; choose another" in rollway("extract", path, 0, "-o", output).stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["show", "none.seg"], "cannot read segment none.seg"),
        (["show", "."], "no segments"),
        (["recover", "none.seg"], "cannot open segment none.seg"),
        (["extract", "none.seg", "0", "-o", "x"], "cannot read segment"),
    ],
)
def test_mistakes_are_one_line(
    args: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    failed = rollway(*args)
    assert failed.returncode == 1
    assert said in failed.stderr
    assert len(failed.stderr.splitlines()) == 1


def test_an_offset_without_a_blob_is_refused(tmp_path: Path, refs: list[PayloadRef]) -> None:
    failed = rollway("extract", tmp_path / refs[0].segment, 7, "-o", tmp_path / "x")
    assert failed.returncode == 1
    assert "no whole blob at offset 7" in failed.stderr
