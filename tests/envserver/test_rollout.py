"""What authors can write, played with the kit of a real worker: real engine, real lanes, real files."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
from msgspec import Struct, structs
from tests.doubles.env_server import env_config, router_spec

import rollway as rw
from rollway import testing
from rollway.config.specs import WorkerSpec
from rollway.envs.background_tasks import keep_track
from rollway.envs.environment import needs_whole_groups
from rollway.envs.in_lane import take_tasks
from rollway.envserver.worker.group import LiveGroup
from rollway.envserver.worker.kit import Kit, Prepared, open_kit, open_store, prepare
from rollway.envserver.worker.live_rollout import LiveRollout
from rollway.envserver.worker.rollout import commit, play
from rollway.loop.watch.lag import LagMonitor
from rollway.loop.watch.run import LoopWatch
from rollway.loop.watch.stalls import StallWatch
from rollway.payload.reader import SegmentReader
from rollway.payload.store import PayloadStore
from rollway.records.ids import PolicyVersion, RolloutId
from rollway.records.rollout import Failed, Outcome, Scored
from rollway.records.task import Task
from rollway.records.turn import Sampling
from rollway.testing import PolicyPrompt, ScriptedEngine, scripted_engine
from rollway.testing.model import model
from rollway.transport.files import wait_for_file
from rollway.wire.messages import Run

pytestmark = pytest.mark.anyio

TASK = rw.Task(id="0", prompt="1?", answer="2")
ENVS = str(Path(__file__).parents[1] / "doubles" / "authoring.py")


def answer(prompt: PolicyPrompt) -> str:
    """Answer `n?` with n + 1, `call TOOL …` with a tool call, and a tool's result by repeating it."""
    text = prompt.last_text
    if prompt.messages[-1].role == "tool":
        return f"I got {text}"
    if text.startswith("call "):
        name, *numbers = text.split()[1:]
        arguments = ", ".join(f'"{key}": {n}' for key, n in zip("ab", numbers, strict=False))
        return (
            f'<tool_call>\n{{"name": "{name}", "arguments": {{{arguments}}}}}\n</tool_call>'
        )
    return str(int(text.removeprefix("slow ").rstrip("?")) + 1)


class Bench(Struct):
    """A worker's kit, its engine, and the store it commits to."""

    prepared: Prepared
    kit: Kit
    store: PayloadStore
    engine: ScriptedEngine
    reader: SegmentReader
    num_runs: int = 0

    def order(self, prompt: str = "1?") -> Run:
        self.num_runs += 1
        task = Task(id="0", prompt=prompt, answer="2")
        return Run(
            RolloutId(f"r{self.num_runs}"), 1, task, Sampling(200), PolicyVersion(0), 0
        )

    async def run(self, prompt: str = "1?") -> Outcome:
        return await self.outcome(self.order(prompt))

    async def outcome(self, run: Run, group: LiveGroup | None = None) -> Outcome:
        live = LiveRollout(run)
        try:
            played = await play(self.kit, live, group)
        finally:
            if group is not None:
                group.leave(run.rollout_id)
        if isinstance(played, Failed):
            return played
        return (await commit(self.kit, live, played, self.store)).outcome

    async def run_group(self, *prompts: str) -> list[Outcome]:
        runs = [self.order(prompt) for prompt in prompts]
        members = frozenset(run.rollout_id for run in runs)
        group = LiveGroup(runs[0].task, members, self.kit.scoring)
        return list(await asyncio.gather(*(self.outcome(run, group) for run in runs)))


@asynccontextmanager
async def bench(
    folder: Path, kind: str, latency_s: float = 0.0, **env: Any
) -> AsyncIterator[Bench]:
    keep_track(asyncio.get_running_loop())
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(scripted_engine(answer, latency_s=latency_s))
        server = router_spec(env_config(ENVS, kind, **env), model(), engine.url, folder)
        prepared = prepare(WorkerSpec(0, kind, 0, "", -1, server))
        stalls = stack.enter_context(StallWatch(0.01, 1.0))
        watch = LoopWatch("w", server.watch, stack.enter_context(LagMonitor(0.01)), stalls)
        kit = await stack.enter_async_context(open_kit(prepared, watch))
        store = stack.enter_context(open_store(prepared.part))
        yield Bench(prepared, kit, store, engine, SegmentReader(folder))
    asyncio.get_running_loop().set_task_factory(None)


def scored(outcome: Outcome) -> Scored:
    assert isinstance(outcome, Scored), outcome
    return outcome


def failed(outcome: Outcome) -> Failed:
    assert isinstance(outcome, Failed), outcome
    return outcome


async def test_a_rollout_calls_async_and_plain_tools(tmp_path: Path) -> None:
    async with bench(tmp_path, "WithTools") as worker:
        for prompt, reply in [("call add 2 3", "I got 5"), ("call double 4", "I got 8")]:
            end = scored(await worker.run(prompt))
            assert end.num_turns == 2
            assert reply in worker.reader.open(end.ref)["transcript"].tobytes().decode()
            assert len(end.rows) == 1, "the tool's answer extends the row"


async def test_a_plain_tool_that_hangs_is_killed_and_the_policy_hears_of_it(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path, "WithTools", tool_deadline_s=1.0) as worker:
        end = scored(await worker.run("call sleep"))
        assert (
            "ran longer than 1 s"
            in worker.reader.open(end.ref)["transcript"].tobytes().decode()
        )


async def test_plain_rollouts_and_updates_have_turns_tools_and_children(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path, "PlainCode") as worker:
        ends = [
            scored(end) for end in await asyncio.gather(*(worker.run() for _ in range(3)))
        ]
        assert [end.reward for end in ends] == [1.0] * 3
        assert {(end.num_turns, len(end.rows)) for end in ends} == {(4, 2)}


async def test_plain_code_that_hangs_or_raises_fails_its_rollout_only(tmp_path: Path) -> None:
    async with bench(tmp_path, "PlainStuck", rollout_deadline_s=1.0) as worker:
        assert failed(await worker.run()).boundary == "deadline"
    async with bench(tmp_path, "PlainRaises") as worker:
        end = failed(await worker.run())
        assert end.boundary == "env"
        assert "plainly wrong" in end.error
        assert "authoring.py" in end.traceback


async def test_a_cancel_reaches_plain_code_that_refuses_to_end(tmp_path: Path) -> None:
    mark = tmp_path / "clings"
    async with bench(tmp_path, "PlainClings") as worker:
        order = worker.order()
        task = structs.replace(order.task, info={"mark": str(mark)})
        running = asyncio.create_task(worker.outcome(structs.replace(order, task=task)))
        await wait_for_file(mark)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_a_rollout_ends_where_a_stop_condition_or_a_limit_says(tmp_path: Path) -> None:
    async with bench(tmp_path, "Stops") as worker:
        end = scored(await worker.run())
        assert (end.stop, end.num_turns) == ("at_four", 3)
    async with bench(tmp_path, "Limited") as worker:
        end = scored(await worker.run())
        assert (end.stop, end.num_turns) == ("max_turns", 2)


class Repeats(rw.Environment):
    """Says the same thing forever, and asks a child after its first turn."""

    def tasks(self) -> Iterator[rw.Task]:
        return iter([])

    async def rollout(self, task: rw.Task, chat: rw.Chat) -> None:
        await chat.say("1?")
        await chat.child("5?")
        while True:
            await chat.say("1?")

    @rw.reward
    def right(self, task: rw.Task, rollout: rw.Rollout) -> float:
        return 1.0


class LimitedTurns(Repeats):
    max_turns = 4


class LimitedTokens(Repeats):
    max_rollout_tokens = 5


class StopsAtLimit(LimitedTurns):
    asked_at: ClassVar[list[int]] = []

    @rw.stop
    def at_third_reply(self, task: rw.Task, chat: rw.Chat) -> bool:
        assert not chat.is_child
        self.asked_at.append(len(chat.replies))
        return len(chat.replies) == 3


async def test_limits_count_the_turns_and_tokens_of_children() -> None:
    turns = await testing.play(LimitedTurns(), TASK, answer)
    assert (turns.stop, turns.rollout.num_turns) == ("max_turns", 4)
    assert len([reply for reply in turns.messages if reply.role == "assistant"]) == 3
    tokens = await testing.play(LimitedTokens(), TASK, answer)
    assert (tokens.stop, tokens.rollout.num_turns) == ("max_rollout_tokens", 3), (
        "two tokens each"
    )


async def test_a_stop_condition_is_asked_before_all_turns_but_the_first_and_before_limits() -> (
    None
):
    played = await testing.play(StopsAtLimit(), TASK, answer)
    assert (played.stop, played.rollout.num_turns) == ("at_third_reply", 4)
    assert StopsAtLimit.asked_at == [1, 2, 3]


async def test_a_simulated_user_speaks_until_it_returns_none(tmp_path: Path) -> None:
    async with bench(tmp_path, "Converses") as worker:
        end = scored(await worker.run())
        assert (end.num_turns, len(end.rows), end.reward) == (3, 1, 0.0)


async def test_a_group_is_scored_together_once_all_have_arrived_or_failed(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path, "Ranked") as worker:
        assert needs_whole_groups(worker.prepared.env)
        ends = await worker.run_group("1?", "2?", "not a number", "3?")
        assert failed(ends[2]).boundary == "engine"
        rewards = [scored(ends[index]).rewards for index in (0, 1, 3)]
        assert sorted(scores["rank"] for scores in rewards) == [0.0, 1.0, 2.0]
        assert {scores["size"] for scores in rewards} == {3.0}
        first = scored(ends[0])
        assert first.reward == 1.0 + 2.0 * first.rewards["rank"] + 3.0
    async with bench(tmp_path, "BadRanks") as worker:
        ends = await worker.run_group("1?", "2?")
        assert {failed(end).boundary for end in ends} == {"scorer"}
        assert "rank returned 1 rewards for 2 rollouts" in failed(ends[0]).error


async def test_shared_toolsets_are_opened_once_and_closed_once(tmp_path: Path) -> None:
    async with bench(tmp_path, "SharesTools") as worker:
        kinds = [type(toolset) for toolset in worker.prepared.env.tools(worker.order().task)]
        before = [(kind.opened, kind.closed) for kind in kinds]  # type: ignore[attr-defined]
        assert before == [(0, 0), (0, 0)]
        for end in await worker.run_group(*["1?"] * 4):
            scored(end)
        await worker.run_group(*["1?"] * 2)
        counts = [(kind.opened, kind.closed) for kind in kinds]  # type: ignore[attr-defined]
        assert counts == [(2, 2), (1, 0)]
        alone = failed(await worker.run())
        assert "set needs_whole_groups = True" in alone.error
    assert [(kind.opened, kind.closed) for kind in kinds] == [(2, 2), (1, 1)]  # type: ignore[attr-defined]


async def test_tasks_that_a_rollout_started_end_with_it(tmp_path: Path) -> None:
    async with bench(tmp_path, "Forgetful", latency_s=0.2) as worker:
        end = scored(await worker.run())
        assert end.num_turns == 1
        started = worker.prepared.env.started  # type: ignore[attr-defined]
        assert len(started) == 3
        assert all(task.cancelled() for task in started)
        await worker.engine.until_running(0)


async def test_a_reward_may_start_children_with_the_rollouts_tools(tmp_path: Path) -> None:
    async with bench(tmp_path, "Judged") as worker:
        end = scored(await worker.run())
        assert end.rewards == {"right": 1.0, "judged": 22.0}
        assert (end.num_turns, len(end.rows)) == (1, 1), (
            "what a reward says is not trained on"
        )


async def test_evaluation_takes_its_tasks_from_eval_tasks(tmp_path: Path) -> None:
    async with bench(tmp_path, "Asking") as worker:
        spec = worker.prepared.spec
        assert [task.id for task in take_tasks(spec, 0, 5)] == ["0"]
        assert [task.id for task in take_tasks(spec, 0, 5, "eval")] == ["eval"]
