"""Blobs are laid out in pieces, parsed as views, opened by safetensors, checked by their checksum."""

from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st
from tests.payload.columns import as_bytes, columns

from rollway.errors import PayloadError
from rollway.payload.blob import ALIGN, build, check_data, join, parse, read_header


@given(columns())
def test_a_blob_is_a_safetensors_file(given_columns: dict[str, list[Any]]) -> None:
    blob = build(given_columns)
    raw = as_bytes(blob)
    assert len(raw) == blob.length
    opened = safetensors.numpy.load(raw)
    assert opened.keys() == given_columns.keys()
    for name, chunks in given_columns.items():
        np.testing.assert_array_equal(opened[name], np.concatenate(chunks))


@given(columns())
def test_the_header_is_aligned_and_has_the_checksum_of_the_data(
    cols: dict[str, list[Any]],
) -> None:
    raw = memoryview(as_bytes(build(cols)))
    header = read_header(raw)
    assert header.start % ALIGN == 0
    assert header.end == len(raw)
    assert int(header.crc32c, 16) == crc32c(raw[header.start :])
    check_data(raw)


def test_safetensors_reads_the_checksum(tmp_path: Any) -> None:
    raw = as_bytes(build({"a": [np.arange(5, dtype=np.int32)]}))
    (tmp_path / "one.safetensors").write_bytes(raw)
    with safetensors.safe_open(tmp_path / "one.safetensors", "np") as file:
        assert file.metadata()["crc32c"] == read_header(memoryview(raw)).crc32c


@given(columns())
def test_parsing_gives_back_what_was_built(given_columns: dict[str, list[Any]]) -> None:
    for name, column in parse(memoryview(as_bytes(build(given_columns)))).items():
        expected = np.concatenate(given_columns[name])
        assert column.dtype == expected.dtype
        np.testing.assert_array_equal(column, expected)


@given(columns())
def test_a_joined_blob_has_the_same_bytes(given_columns: dict[str, list[Any]]) -> None:
    blob = build(given_columns)
    assert bytes(join(blob)) == as_bytes(blob)


@given(columns(), st.data())
def test_a_blob_that_was_cut_anywhere_is_refused(
    cols: dict[str, list[Any]], data: st.DataObject
) -> None:
    raw = as_bytes(build(cols))
    cut = data.draw(st.integers(0, len(raw) - 1))
    with pytest.raises(PayloadError):
        parse(memoryview(raw[:cut]))


@given(columns(), st.data())
def test_any_flipped_bit_of_the_data_is_noticed(
    cols: dict[str, list[Any]], data: st.DataObject
) -> None:
    raw = bytearray(as_bytes(build(cols)))
    start = read_header(memoryview(raw)).start
    if start == len(raw):
        return
    at = data.draw(st.integers(start, len(raw) - 1))
    raw[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(PayloadError, match="checksum"):
        check_data(memoryview(raw))


@given(st.binary(max_size=200))
def test_bytes_that_are_not_a_blob_are_refused(raw: bytes) -> None:
    with pytest.raises(PayloadError, match="are not a blob"):
        check_data(memoryview(raw))
