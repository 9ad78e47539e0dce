"""What the router and its peers decode: bounds, sides, and how bad frames are told."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollway.errors import ProtocolError
from rollway.records.ids import PolicyVersion, RolloutId, WorkerName
from rollway.records.lag import LagStats, ProcessStats
from rollway.records.payload import PayloadRef
from rollway.records.rollout import Cancelled, Settled
from rollway.records.task import Task
from rollway.records.turn import Sampling
from rollway.wire.messages import (
    Cancel,
    FrameTaken,
    Hello,
    NewPolicy,
    NextTasks,
    Ping,
    RolloutPhases,
    Run,
    RunGroup,
    ServerStats,
    Tasks,
    Welcome,
    encode,
    for_client,
    for_worker,
    from_client,
    from_worker,
    unread_runs,
)

TASK = Task("1", "say", answer={"a": [1, None, 2.5]}, info={"n": 1})
RUN = Run(RolloutId("g1.2"), 1, TASK, Sampling(8), PolicyVersion(3), 0)
SETTLED = Settled(RolloutId("r"), 1, WorkerName("w"), Cancelled(""))
CLIENT = [Hello("c"), NextTasks(0, 5), RUN, RunGroup.of([RUN, RUN]), Cancel(RolloutId("r"), "why"),
          Ping(), NewPolicy(PolicyVersion(1)), FrameTaken(WorkerName("w"), 5)]  # fmt: skip
WORKER = [
    Tasks(0, (TASK,)),
    SETTLED,
    RolloutPhases(WorkerName("w"), ()),
    ServerStats(ProcessStats("w", LagStats(), 1)),
]


def changed(message: Any, **fields: Any) -> bytes:
    """The message as a peer without our checks would send it; `a__b` reaches into `a`."""
    tree = msgspec.to_builtins(message)
    for path, value in fields.items():
        *above, last = path.split("__")
        node = tree
        for key in above:
            node = node[key]
        node[last] = value
    return msgspec.msgpack.encode(tree)


@pytest.mark.parametrize("message", CLIENT, ids=lambda message: type(message).__name__)
def test_what_clients_say_passes_the_router_unchanged(message: Any) -> None:
    passed = from_client(encode(message))
    assert isinstance(passed, type(message))
    if isinstance(message, Run | RunGroup):
        assert for_worker(encode(passed)) == message
    else:
        assert passed == message


@pytest.mark.parametrize("message", WORKER, ids=lambda message: type(message).__name__)
def test_each_side_says_only_what_is_its_own(message: Any) -> None:
    assert from_worker(encode(message)) == message
    with pytest.raises(ProtocolError):
        from_client(encode(message))
    with pytest.raises(ProtocolError):
        from_worker(encode(RUN))


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "frame",
    [
        changed(NextTasks(0, 1), count=10**12),
        changed(NextTasks(0, 1), count=0),
        changed(NextTasks(0, 1), start=-1),
        changed(NextTasks(0, 1), start=2**63),
        changed(NextTasks(0, 1), count=NAN),
        changed(NextTasks(0, 1), split="test"),
        changed(Hello("c"), credits=-1),
        changed(Hello("c"), name="x" * 1001),
        changed(Hello("c"), protocol=-(2**63)),
        changed(RUN, sampling__max_tokens=-5),
        changed(RUN, sampling__max_tokens=0),
        changed(RUN, sampling__max_tokens=2**40),
        changed(RUN, sampling__temperature=NAN),
        changed(RUN, sampling__temperature=INF),
        changed(RUN, sampling__temperature=-0.1),
        changed(RUN, sampling__top_p=NAN),
        changed(RUN, sampling__top_p=0.0),
        changed(RUN, attempt=0),
        changed(RUN, version=-1),
        changed(RUN, task__id="x" * 1001),
        changed(RUN, task__prompt=5),
        changed(RUN, rollout_id=""),
        changed(RUN, rollout_id="a\nb"),
        changed(RUN, rollout_id="a b"),
        changed(RUN, rollout_id="r\n"),
        changed(RUN, rollout_id="ü"),
        changed(RUN, rollout_id="x" * 201),
        changed(Cancel(RolloutId("r"), ""), reason="x" * 1001),
        changed(RunGroup.of([RUN]), members=[]),
        changed(NewPolicy(PolicyVersion(1)), version=-1),
        changed(NewPolicy(PolicyVersion(1)), version=2**31),
        changed(NewPolicy(PolicyVersion(1)), version=2**53),
        changed(FrameTaken(WorkerName("w"), 1), num_bytes=-1),
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\x81\xa4type\xa5hello\xff",
        b"\x82\xa4type\xa5hello\xa4name\xa2\xff\xfe",
    ],
)
def test_what_is_out_of_bounds_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        from_client(frame)


@pytest.mark.parametrize(
    "segment", ["../x.seg", "/etc/x.seg", "a/b.seg", "..", ".x", "a\\b", "a\x00b", "x" * 201]
)
def test_a_ref_leads_to_no_other_folder(segment: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"segment": segment, "offset": 0, "length": 1}, PayloadRef)
    for name in ("", "envs.w0.0-0000.seg"):
        msgspec.convert({"segment": name, "offset": 0, "length": 1}, PayloadRef)


def test_what_is_told_of_a_bad_frame_is_short_and_on_one_line() -> None:
    with pytest.raises(ProtocolError) as refused:
        from_client(msgspec.msgpack.encode({"type": "\n" + "x" * 100_000}))
    assert len(str(refused.value)) < 300
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("info", [b"\x05", b"\x81\xa2\xff\xfe\x00", b"\x81\xa1a\x81\x80\x00"])
def test_a_task_that_only_its_worker_can_judge_still_has_an_id(info: bytes) -> None:
    """The router passes such tasks on unread; the worker knows whom to answer."""
    tree = msgspec.to_builtins(RUN)
    tree["task"] = {"id": "1", "prompt": "", "info": msgspec.Raw(info)}
    passed = encode(from_client(msgspec.msgpack.encode(tree)))
    with pytest.raises(ProtocolError):
        for_worker(passed)
    assert unread_runs(passed) == [("g1.2", 1)]
    together = msgspec.to_builtins(RunGroup.of([RUN, RUN])) | {"task": tree["task"]}
    group = encode(from_client(msgspec.msgpack.encode(together)))
    with pytest.raises(ProtocolError):
        for_worker(group)
    assert unread_runs(group) == [("g1.2", 1), ("g1.2", 1)]
    assert unread_runs(b"noise") == []


@given(st.binary(max_size=200))
def test_noise_is_a_protocol_error_for_everybody(frame: bytes) -> None:
    for decode in (from_client, from_worker, for_worker, for_client):
        with pytest.raises(ProtocolError):
            decode(frame)


@given(st.sampled_from([*CLIENT, *WORKER, Welcome("e", 1)]), st.data())
def test_a_mutated_message_is_one_or_a_protocol_error(
    message: Any, data: st.DataObject
) -> None:
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    for decode in (from_client, from_worker, for_worker, for_client):
        try:
            encode(decode(bytes(frame)))  # what was read can also be passed on
        except ProtocolError:
            continue
