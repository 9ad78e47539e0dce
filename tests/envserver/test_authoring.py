"""What authors can write, run by a worker's own runner: real engine, real lanes, real files."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from rollway.config.sections import EngineConfig, EnvConfig, ModelConfig, PayloadConfig
from rollway.config.specs import RouterSpec, WatchSpec, WorkerSpec
from rollway.envs.background_tasks import keep_track
from rollway.envs.environment import needs_whole_groups
from rollway.envs.in_lane import take_tasks
from rollway.envserver.worker.kit import Prepared, open_runner, prepare
from rollway.envserver.worker.rollout import RolloutRunner
from rollway.envserver.worker.speakers import open_policy
from rollway.envserver.worker.track import Track
from rollway.loop.watch.lag import LagMonitor
from rollway.loop.watch.run import LoopWatch
from rollway.loop.watch.stalls import StallWatch
from rollway.payload.reader import SegmentReader
from rollway.payload.writer import SegmentWriter
from rollway.records.ids import PolicyVersion, RolloutId
from rollway.records.payload import SegmentName
from rollway.records.rollout import Failed, Outcome, Scored
from rollway.records.task import Task
from rollway.records.turn import Sampling
from rollway.testing import PolicyPrompt, ScriptedEngine, scripted_engine
from rollway.transport.files import wait_for_file
from rollway.wire.messages import Run

pytestmark = pytest.mark.anyio

ENVS = str(Path(__file__).parents[1] / "doubles" / "authoring.py")


def answer(asked: PolicyPrompt) -> str:
    """`n?` gives n + 1, `call TOOL …` a tool call, and a tool's answer is repeated."""
    said = asked.said
    if asked.messages[-1].role == "tool":
        return f"I got {said}"
    if said.startswith("call "):
        name, *numbers = said.split()[1:]
        arguments = ", ".join(f'"{key}": {n}' for key, n in zip("ab", numbers, strict=False))
        return f'<tool_call>\n{{"name": "{name}", "arguments": {{{arguments}}}}}\n</tool_call>'
    return str(int(said.removeprefix("slow ").rstrip("?")) + 1)


class Stage:
    """A runner, its engine, and what it writes."""

    def __init__(
        self, prepared: Prepared, runner: RolloutRunner, engine: ScriptedEngine, folder: Path
    ) -> None:
        self.prepared = prepared
        self.engine = engine
        self.reader = SegmentReader(folder)
        self.runner = runner
        self._num = 0

    def order(self, prompt: str = "1?") -> Run:
        self._num += 1
        task = Task(id="0", prompt=prompt, answer="2")
        return Run(RolloutId(f"r{self._num}"), 1, task, Sampling(200), PolicyVersion(0))

    async def run(self, prompt: str = "1?") -> Outcome:
        return await self.runner.run(self.order(prompt), Track())

    async def run_group(self, *prompts: str) -> list[Outcome]:
        runs = tuple(self.order(prompt) for prompt in prompts)
        group = self.runner.group_of(runs)

        async def member(run: Run) -> Outcome:
            try:
                return await self.runner.run(run, Track(), group)
            finally:
                group.leave(run.rollout_id)

        return list(await asyncio.gather(*(member(run) for run in runs)))


@asynccontextmanager
async def stage(
    folder: Path, model: Path, kind: str, latency_s: float = 0.0, **env: Any
) -> AsyncIterator[Stage]:
    keep_track(asyncio.get_running_loop())
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(
            scripted_engine(answer, latency_s=latency_s, folder=model)
        )
        server = RouterSpec(
            env=EnvConfig(id=ENVS, args={"kind": kind}, **env),
            model=ModelConfig(path=str(model), renderer="qwen3", template={"enable_thinking": False}),
            engine=EngineConfig(), engine_urls=(engine.url,), payload=PayloadConfig(),
            payload_dir=str(folder), log_dir=str(folder), seed=0, watch=WatchSpec(),
        )  # fmt: skip
        prepared = prepare(WorkerSpec("w", "", -1, server))
        stalls = stack.enter_context(StallWatch(0.01, 1.0))
        watch = LoopWatch("w", server.watch, stack.enter_context(LagMonitor(0.01)), stalls)
        policy = await stack.enter_async_context(open_policy("w", server, prepared.speech, watch))
        store = stack.enter_context(SegmentWriter(folder, SegmentName(kind, 0), 1 << 30))
        runner = await open_runner(prepared, watch, policy, store, stack)
        yield Stage(prepared, runner, engine, folder)
    asyncio.get_running_loop().set_task_factory(None)


def scored(outcome: Outcome) -> Scored:
    assert isinstance(outcome, Scored), outcome
    return outcome


def failed(outcome: Outcome) -> Failed:
    assert isinstance(outcome, Failed), outcome
    return outcome


async def test_tools_async_and_plain(tmp_path: Path, tiny_moe: Path) -> None:
    async with stage(tmp_path, tiny_moe, "WithTools") as on:
        for prompt, said in [("call add 2 3", "I got 5"), ("call double 4", "I got 8")]:
            end = scored(await on.run(prompt))
            assert end.num_turns == 2
            assert said in on.reader.open(end.ref)["transcript"].tobytes().decode()
            assert len(end.rows) == 1, "the tool's answer extends the row"


async def test_a_plain_tool_that_hangs_is_killed_and_told(tmp_path: Path, tiny_moe: Path) -> None:
    async with stage(tmp_path, tiny_moe, "WithTools", tool_deadline_s=1.0) as on:
        end = scored(await on.run("call sleep"))
        assert "ran longer than 1 s" in on.reader.open(end.ref)["transcript"].tobytes().decode()


async def test_plain_rollouts_and_updates_have_turns_tools_and_children(
    tmp_path: Path, tiny_moe: Path
) -> None:
    async with stage(tmp_path, tiny_moe, "PlainCode") as on:
        ends = [scored(one) for one in await asyncio.gather(*(on.run() for _ in range(3)))]
        assert [one.reward for one in ends] == [1.0] * 3
        assert {(one.num_turns, len(one.rows)) for one in ends} == {(4, 2)}


async def test_plain_code_that_hangs_or_raises_fails_by_itself(tmp_path: Path, tiny_moe: Path) -> None:
    async with stage(tmp_path, tiny_moe, "PlainStuck", rollout_deadline_s=1.0) as on:
        assert failed(await on.run()).boundary == "deadline"
    async with stage(tmp_path, tiny_moe, "PlainRaises") as on:
        end = failed(await on.run())
        assert end.boundary == "env"
        assert "plainly wrong" in end.error
        assert "authoring.py" in end.traceback


async def test_cancelling_reaches_plain_code_that_will_not_end(tmp_path: Path, tiny_moe: Path) -> None:
    mark = tmp_path / "clings"
    async with stage(tmp_path, tiny_moe, "PlainClings") as on:
        order = on.order()
        task = structs.replace(order.task, info={"mark": str(mark)})
        running = asyncio.create_task(on.runner.run(structs.replace(order, task=task), Track()))
        await wait_for_file(mark)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_a_rollout_ends_where_a_stop_condition_or_a_limit_says(
    tmp_path: Path, tiny_moe: Path
) -> None:
    async with stage(tmp_path, tiny_moe, "Stops") as on:
        end = scored(await on.run())
        assert (end.stop, end.num_turns) == ("at_four", 3)
    async with stage(tmp_path, tiny_moe, "Limited") as on:
        end = scored(await on.run())
        assert (end.stop, end.num_turns) == ("max_turns", 2)


async def test_a_simulated_user_speaks_until_it_has_no_more_to_say(
    tmp_path: Path, tiny_moe: Path
) -> None:
    async with stage(tmp_path, tiny_moe, "Converses") as on:
        end = scored(await on.run())
        assert (end.num_turns, len(end.rows), end.reward) == (3, 1, 0.0)


async def test_a_group_is_scored_together_once_all_have_arrived_or_failed(
    tmp_path: Path, tiny_moe: Path
) -> None:
    async with stage(tmp_path, tiny_moe, "Ranked") as on:
        assert needs_whole_groups(on.prepared.env)
        ends = await on.run_group("1?", "2?", "not a number", "3?")
        assert failed(ends[2]).boundary == "engine"
        rewards = [scored(ends[index]).rewards for index in (0, 1, 3)]
        assert sorted(one["rank"] for one in rewards) == [0.0, 1.0, 2.0]
        assert {one["size"] for one in rewards} == {3.0}
        first = scored(ends[0])
        assert first.reward == 1.0 + 2.0 * first.rewards["rank"] + 3.0
    async with stage(tmp_path, tiny_moe, "BadRanks") as on:
        ends = await on.run_group("1?", "2?")
        assert {failed(one).boundary for one in ends} == {"scorer"}
        assert "rank returned 1 rewards for 2 rollouts" in failed(ends[0]).error


async def test_shared_toolsets_are_opened_once_and_closed_once(tmp_path: Path, tiny_moe: Path) -> None:
    async with stage(tmp_path, tiny_moe, "SharesTools") as on:
        kinds = [type(one) for one in on.prepared.env.tools(on.order().task)]
        before = [(kind.opened, kind.closed) for kind in kinds]  # type: ignore[attr-defined]
        assert before == [(0, 0), (0, 0)]
        for one in await on.run_group(*["1?"] * 4):
            scored(one)
        await on.run_group(*["1?"] * 2)
        counts = [(kind.opened, kind.closed) for kind in kinds]  # type: ignore[attr-defined]
        assert counts == [(2, 2), (1, 0)]
        alone = failed(await on.run())
        assert "set needs_whole_groups = True" in alone.error
    assert [(kind.opened, kind.closed) for kind in kinds] == [(2, 2), (1, 1)]  # type: ignore[attr-defined]


async def test_nothing_that_a_rollout_started_outlives_it(tmp_path: Path, tiny_moe: Path) -> None:
    async with stage(tmp_path, tiny_moe, "Forgetful", latency_s=0.2) as on:
        end = scored(await on.run())
        assert end.num_turns == 1
        started = on.prepared.env.started  # type: ignore[attr-defined]
        assert len(started) == 3
        assert all(one.cancelled() for one in started)
        await on.engine.until_running(0)


async def test_a_reward_may_ask_children_with_the_rollouts_tools(tmp_path: Path, tiny_moe: Path) -> None:
    async with stage(tmp_path, tiny_moe, "Judged") as on:
        end = scored(await on.run())
        assert end.rewards == {"right": 1.0, "judged": 22.0}
        assert (end.num_turns, len(end.rows)) == (1, 1), "what a reward says is not trained on"


async def test_evaluation_has_tasks_of_its_own(tmp_path: Path, tiny_moe: Path) -> None:
    async with stage(tmp_path, tiny_moe, "Asking") as on:
        spec = on.prepared.spec
        assert [one.id for one in take_tasks(spec, 0, 5)] == ["0"]
        assert [one.id for one in take_tasks(spec, 0, 5, "eval")] == ["eval"]
