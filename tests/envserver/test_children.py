"""Children in any schedule: no call is lost, tools open and close once, rows hold what was drawn.

The environment below starts children in its rollout, its update and its reward. All of them borrow the
open toolset of their parent. Policies and tools wait for random times before they answer.
"""

import asyncio
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
from tests.doubles.engine import WITH_ROUTES

import rollway as rw
from rollway import testing
from rollway.inference.engines.dialect import Prompt
from rollway.inference.engines.engine import Engine, open_engine
from rollway.inference.engines.link import EngineAccess
from rollway.records.turn import Sampling, Turn
from rollway.testing import Played, PolicyPrompt, Stage, call
from rollway.testing.model import tokenizer
from rollway.testing.script import draw

pytestmark = pytest.mark.anyio

NUM_CHILDREN = 2
Pause = Callable[[], Awaitable[None]]


class Shelf(rw.Toolset):
    """Notes its visitors. It must be open when they come."""

    def __init__(self, pause: Pause) -> None:
        self._pause = pause
        self.num_opened = self.num_closed = self.num_inside = self.most_inside = 0
        self.visitors: list[str] = []

    async def __aenter__(self) -> "Shelf":
        await self._pause()
        self.num_opened += 1
        return self

    async def __aexit__(self, *_: Any) -> None:
        assert self.num_inside == 0, "closed while it is in use"
        await self._pause()
        self.num_closed += 1

    @rw.tool
    async def take(self, who: str) -> str:
        """Take a book from the shelf."""
        assert self.num_opened == 1
        assert self.num_closed == 0
        self.num_inside += 1
        self.most_inside = max(self.most_inside, self.num_inside)
        await self._pause()
        self.num_inside -= 1
        self.visitors.append(who)
        return f"{who} was here"


class Library(rw.Environment):
    """A rollout with one child, an update with several at the same time, a reward with another."""

    def __init__(self, pause: Pause) -> None:
        self._pause = pause
        self.shelves: dict[str, Shelf] = {}

    def tasks(self) -> Iterator[rw.Task]:
        return iter([])

    def tools(self, task: rw.Task) -> list[rw.Toolset]:
        assert task.id not in self.shelves
        self.shelves[task.id] = Shelf(self._pause)
        return [self.shelves[task.id]]

    async def rollout(self, task: rw.Task, chat: rw.Chat) -> None:
        await asyncio.gather(
            chat.act(f"parent of {task.id}"),
            chat.child(f"early of {task.id}", tools=chat.tools),
        )

    @rw.update
    async def ask_children(self, task: rw.Task, chat: rw.Chat) -> None:
        async with asyncio.TaskGroup() as tasks:
            children = [
                tasks.create_task(chat.child(f"child{n} of {task.id}", tools=chat.tools))
                for n in range(NUM_CHILDREN)
            ]
        chat.info["replies"] = [child.result().last_text for child in children]

    @rw.reward
    async def judged(self, task: rw.Task, rollout: rw.Rollout, chat: rw.Chat) -> float:
        child, reply = await asyncio.gather(
            chat.child(f"judge of {task.id}", tools=chat.tools),
            chat.act(f"jury of {task.id}"),
        )
        return float("was here" in child.last_text and "was here" in reply.text)


ROLLOUT = ("parent", "early", *(f"child{n}" for n in range(NUM_CHILDREN)))
REWARD = ("judge", "jury")


def answer(prompt: PolicyPrompt) -> str:
    """Call the tool, then repeat its result."""
    who, _, task = prompt.first_text.partition(" of ")
    return prompt.last_text if prompt.results else call("take", who=f"{who} {task}")


class InProcess:
    """The script as an engine without a server. It remembers its prompts and what it drew."""

    max_context = 0

    def __init__(self, pause: Pause) -> None:
        self._pause = pause
        self.drawn: list[tuple[list[int], list[int]]] = []

    async def complete(
        self, prompt: Prompt, sampling: Sampling, stop_ids: list[int], routes_start: int
    ) -> Turn:
        await self._pause()
        prompt_ids = prompt.ids.tolist()
        reply = await draw(answer, tokenizer(), prompt_ids, sampling.max_tokens, stop_ids[0])
        drawn = reply.token_ids
        await self._pause()
        self.drawn.append((prompt_ids, drawn))
        return Turn(
            prompt_ids=prompt.ids,
            completion_ids=np.array(drawn, np.int32),
            logprobs=np.full(len(drawn), -0.5, np.float32),
            versions=np.zeros(len(drawn), np.int32),
            temperature=sampling.temperature,
            finish_reason="stop",
        )


def check(
    env: Library, task: rw.Task, played: Played, drawn: list[tuple[list[int], list[int]]]
) -> None:
    """Check one rollout against the prompts and replies of its engine."""
    shelf = env.shelves[task.id]
    assert (shelf.num_opened, shelf.num_closed) == (1, 1)
    everyone = [f"{who} {task.id}" for who in (*ROLLOUT, *REWARD)]
    assert sorted(shelf.visitors) == sorted(everyone), "a call was lost, or made twice"
    assert played.reward == 1.0
    assert played.rollout.info["replies"] == [
        f"child{n} {task.id} was here" for n in range(NUM_CHILDREN)
    ]
    kept = [turn for turn in drawn if not spoken_by(REWARD, turn[0])]
    assert len(kept) == played.rollout.num_turns == 2 * len(ROLLOUT)
    assert len(drawn) == 2 * len(ROLLOUT + REWARD)
    assert Counter(spans(played)) == Counter(
        (tuple(prompt), tuple(reply)) for prompt, reply in kept
    )
    assert len(played.rows) == len(ROLLOUT), "one row for each conversation"


def spoken_by(names: tuple[str, ...], prompt_ids: list[int]) -> bool:
    return bool(re.search(rf"user\n({'|'.join(names)}) of ", tokenizer().decode(prompt_ids)))


def spans(played: Played) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return every piece of a row that the policy drew, and all tokens before it."""
    for row in played.rows:
        mask = bytes(row.loss_mask)
        for found in re.finditer(rb"\x01+", mask):
            yield row.token_ids[: found.start()], row.token_ids[found.start() : found.end()]


def task_of(number: int) -> rw.Task:
    return rw.Task(id=f"{number:03}", prompt="")


@pytest.mark.parametrize("seed", range(20))
async def test_no_call_of_a_child_is_lost_in_any_schedule(seed: int) -> None:
    """Fifty rollouts at a time, with yields instead of latencies: a thousand schedules in all."""
    rng = random.Random(seed)

    async def pause() -> None:
        for _ in range(rng.choice([0, 0, 1, 2, 5, 20])):
            await asyncio.sleep(0)

    env = Library(pause)
    engines = [InProcess(pause) for _ in range(50)]
    async with Stage(env) as stage:
        played = await asyncio.gather(
            *(
                stage.play(task_of(n), cast(Engine, engine))
                for n, engine in enumerate(engines)
            )
        )
    for number, (rollout, engine) in enumerate(zip(played, engines, strict=True)):
        check(env, task_of(number), rollout, engine.drawn)
    assert any(shelf.most_inside > 1 for shelf in env.shelves.values()), (
        "no two children used a shelf at the same time"
    )


async def test_no_call_of_a_child_is_lost_over_http() -> None:
    """The same through sockets, with latencies."""
    rng = random.Random(0)

    async def pause() -> None:
        await asyncio.sleep(rng.choice([0, 0.001, 0.003, 0.01]))

    async def slowly(prompt: PolicyPrompt) -> str:
        await pause()
        return answer(prompt)

    env = Library(pause)
    for number in range(20):
        async with (
            testing.scripted_engine(slowly) as engine,
            open_engine(EngineAccess(engine.url, deadline_s=30), WITH_ROUTES) as client,
            Stage(env) as stage,
        ):
            played = await stage.play(task_of(number), client)
        drawn = list(zip(engine.prompts, engine.replies, strict=True))
        check(env, task_of(number), played, drawn)


async def test_a_failing_reward_closes_what_its_rollout_opened() -> None:
    class Raises(Library):
        @rw.reward
        async def judged(self, task: rw.Task, rollout: rw.Rollout, chat: rw.Chat) -> float:
            await chat.child(f"judge of {task.id}", tools=chat.tools)
            raise KeyError("no verdict")

    env = Raises(lambda: asyncio.sleep(0))
    with pytest.raises(testing.RolloutFailed, match="no verdict") as failure:
        await testing.play(env, task_of(0), answer)
    assert failure.value.boundary == "scorer"
    assert (env.shelves["000"].num_opened, env.shelves["000"].num_closed) == (1, 1)
