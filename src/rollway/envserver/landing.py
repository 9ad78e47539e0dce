"""Where payload that travelled as a frame comes to lie: a segment of the receiver's own."""

import msgspec

from ..errors import PayloadError
from ..payload.frames import ON_ITS_WAY
from ..payload.writer import SegmentWriter
from ..records.payload import PayloadRef
from ..records.rollout import Failed, Scored, Settled


async def land(
    settled: Settled, frame: memoryview | None, landing: SegmentWriter | None, *, must_land: bool = False
) -> Settled:
    """The same end with a ref that can be opened here. One whose columns did not arrive, or cannot be
    written, failed. The frame is written as it is, in the thread lane, never decoded. With `must_land`
    columns that stayed in a file of the worker's did not arrive."""
    outcome = settled.outcome
    if not isinstance(outcome, Scored):
        return settled
    try:
        if must_land and outcome.ref.segment != ON_ITS_WAY:
            raise PayloadError(
                f"its server wrote it to {outcome.ref.segment} in a folder of its own; start it with "
                "'--payload frames', or in the run's payload folder and set 'env.shares_payload'"
            )
        ref = await _written(outcome.ref, frame, landing)
    except PayloadError as error:
        failed = Failed("worker", f"payload of {settled.worker}: {error}")
        return msgspec.structs.replace(settled, outcome=failed)
    return msgspec.structs.replace(settled, outcome=msgspec.structs.replace(outcome, ref=ref))


async def _written(
    ref: PayloadRef, frame: memoryview | None, landing: SegmentWriter | None
) -> PayloadRef:
    if ref.segment != ON_ITS_WAY:
        return ref
    if frame is None or len(frame) != ref.length:
        came = "nothing" if frame is None else f"{len(frame)} bytes"
        raise PayloadError(f"{came} arrived beside the record instead of {ref.length} bytes")
    if landing is None:
        raise PayloadError("it came as a frame, and this client was given no place to write it to")
    return await landing.append_whole(frame)
