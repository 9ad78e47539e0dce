"""`rollway payload`: looks into payload segments, without a run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option, Typer, echo

from ..errors import PayloadError
from ..payload.blob import ColumnEntry, check_data
from ..payload.lock import is_in_use
from ..payload.scan import BrokenPiece, Piece, WholeBlob, map_segment, scan, tail_offset
from ..payload.scan import recover as recover_segment
from ..records.text import visible

DAMAGED = 1

app = Typer(
    name="payload",
    help="Look into payload segments: files with the token columns of rollouts, for the trainer.",
    no_args_is_help=True,
)


@app.command()
def show(
    path: Annotated[
        Path, Argument(help="A segment (.seg), or a folder of them: RUN/payload.")
    ],
    verify: Annotated[
        bool, Option("--verify", help="Read all data and compare it with the checksums.")
    ] = False,
) -> None:
    """List the blobs of a segment: offset, length, rows, tokens, columns.

    The exit code is 1 if anything is broken. A broken end is called a torn tail: the process that wrote
    it was killed in the middle of a write.
    """
    shown = [_show_segment(segment, verify=verify) for segment in _segments(path)]
    sums = [sum(column) for column in zip(*(totals for totals, _ in shown), strict=True)]
    num_bytes, num_blobs, num_tokens = sums
    num_damaged = sum(not is_intact for _, is_intact in shown)
    damaged = f"{num_damaged} damaged" if num_damaged else "none damaged"
    echo(
        f"In all: {len(shown)} segments ({damaged}), {num_blobs} blobs, {num_tokens:,} tokens, "
        f"{num_bytes / 1e6:,.1f} MB"
    )
    if num_damaged:
        raise Exit(DAMAGED)


@app.command()
def extract(
    segment: Annotated[Path, Argument(help="A segment file (.seg).")],
    offset: Annotated[
        int, Argument(help="Offset of the blob, as 'rollway payload show' lists it.")
    ],
    output: Annotated[
        Path, Option("--output", "-o", help="The file to write (.safetensors).")
    ],
) -> None:
    """Verify one blob and copy it into a safetensors file."""
    data = map_segment(segment)
    pieces = scan(data, segment.name)
    blobs = (piece for piece in pieces if isinstance(piece, WholeBlob))
    found = next((blob for blob in blobs if blob.offset == offset), None)
    if found is None:
        raise PayloadError(
            f"no whole blob at offset {offset} of {segment}; 'rollway payload show {segment}' lists them"
        )
    blob = data[offset : found.end]
    try:
        check_data(blob)
    except PayloadError as error:
        raise PayloadError(
            f"the blob at offset {offset} of {segment} is damaged: {error}"
        ) from None
    try:
        with output.open("xb") as file:
            file.write(blob)
    except FileExistsError:
        raise PayloadError(f"{output} exists; choose another name for --output") from None
    except OSError as error:
        raise PayloadError(f"cannot write {output}: {error.strerror or error}") from None
    echo(f"{output}: {len(blob)} bytes, {len(found.entries)} columns, checksum ok")


@app.command()
def recover(
    segment: Annotated[
        Path, Argument(help="A segment file (.seg) that no process uses any more.")
    ],
) -> None:
    """Cut the torn tail off a segment whose writer was killed. Whole blobs are not changed."""
    done = recover_segment(segment)
    echo(
        f"{segment}: {done.num_kept} whole blobs kept, {done.num_cut_bytes} bytes of tail cut"
    )
    if done.num_broken:
        echo(
            f"{done.num_broken} broken pieces between whole blobs were left in place",
            err=True,
        )
        raise Exit(DAMAGED)


def _segments(path: Path) -> list[Path]:
    if not path.is_dir():
        if path.exists() and path.suffix != ".seg":
            raise PayloadError(f"{path} is not a segment: their names end in .seg")
        return [path]
    found = sorted(path.glob("*.seg"))
    if not found:
        raise PayloadError(f"no segments (*.seg) in {path}; a run keeps them in RUN/payload")
    return found


def _show_segment(path: Path, *, verify: bool) -> tuple[tuple[int, int, int], bool]:
    """Print one segment. Return its bytes, blobs and tokens, and whether all of it is whole, apart from
    an end that is being written."""
    in_use = is_in_use(path)
    data = map_segment(path)
    pieces = list(scan(data, path.name, verify=verify))
    broken = [piece for piece in pieces if isinstance(piece, BrokenPiece)]
    state = ", in use" if in_use else ""
    echo(f"{path}: {len(data)} bytes, {len(pieces) - len(broken)} blobs{state}")
    tail = tail_offset(pieces)
    rest = [piece for piece in broken if piece.offset >= tail]
    for piece in pieces[: len(pieces) - len(rest)]:
        for line in _lines(piece, verify=verify):
            echo(f"  {visible(line)}")
    if rest:
        kind, start = "unfinished" if in_use else "torn tail", rest[0].offset
        echo(f"  {kind} at {start}, {len(data) - start} bytes: {rest[0].why}")
    num_damaged = len(broken) - len(rest) if in_use else len(broken)
    blobs = [piece for piece in pieces if isinstance(piece, WholeBlob)]
    num_tokens = sum(_num_tokens(_rows(blob.entries)) for blob in blobs)
    return (len(data), len(blobs), num_tokens), num_damaged == 0


def _num_tokens(rows: dict[str, dict[str, ColumnEntry]]) -> int:
    columns = [entries["token_ids"] for entries in rows.values() if "token_ids" in entries]
    return sum(entry.shape[0] for entry in columns)


def _lines(piece: Piece, *, verify: bool) -> Iterator[str]:
    if isinstance(piece, BrokenPiece):
        yield f"broken at {piece.offset}, {piece.length} bytes: {piece.why}"
        return
    rows = _rows(piece.entries)
    num_rows = len([name for name in rows if name])  # '' holds columns of the whole rollout
    num_tokens = _num_tokens(rows)
    checksum = ", checksum ok" if verify else ""
    head = f"at {piece.offset}, {piece.length} bytes"
    yield f"{head}: {num_rows} rows, {num_tokens} tokens{checksum}"
    for name, entries in rows.items():
        columns = [
            f"{key} {entry.dtype}{list(entry.shape)}" for key, entry in entries.items()
        ]
        prefix = f"{name}: " if name else ""
        yield f"  {prefix}{' '.join(columns)}"


def _rows(entries: dict[str, ColumnEntry]) -> dict[str, dict[str, ColumnEntry]]:
    """Return the columns of each row; those of the whole rollout are under ''."""
    rows: dict[str, dict[str, ColumnEntry]] = {}
    for name, entry in sorted(entries.items()):
        row, _, column = name.rpartition(".")
        rows.setdefault(row, {})[column] = entry
    return dict(sorted(rows.items(), key=lambda item: (not item[0], len(item[0]), item[0])))
