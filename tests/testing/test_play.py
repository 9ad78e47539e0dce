"""What `rollway.testing` does for authors of environments."""

import asyncio
import itertools
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.doubles.engine import WITH_ROUTES

import rollway as rw
from rollway import testing
from rollway.errors import EnvironmentInvalid
from rollway.inference.engines.engine import open_engine
from rollway.inference.engines.link import EngineAccess
from rollway.testing import PolicyPrompt, call

pytestmark = pytest.mark.anyio

TASK = rw.Task(id="t", prompt="hello", answer="HELLO")


def loud(prompt: PolicyPrompt) -> str:
    return prompt.last_text.upper()


class Base(rw.Environment):
    def tasks(self) -> Iterator[rw.Task]:
        return iter([TASK])

    @rw.reward
    def exact(self, task: rw.Task, rollout: rw.Rollout) -> float:
        return float(rollout.last_text == task.answer)


class Desk(rw.Toolset):
    async def __aenter__(self) -> "Desk":
        self.is_open = True
        return self

    @rw.tool
    async def is_it_open(self) -> bool:
        """Whether the desk is open."""
        return self.is_open

    @rw.tool
    def copy(self, text: str, times: int = 2) -> str:
        """Write a text several times."""
        return text * times


class WithTools(Base):
    system_prompt = "Be brief."

    def tools(self, task: rw.Task) -> list[rw.Toolset]:
        return [Desk()]


async def test_a_played_rollout_has_rewards_messages_and_rows() -> None:
    played = await testing.play(Base(), TASK, loud)
    assert (played.reward, played.rewards, played.metrics) == (1.0, {"exact": 1.0}, {})
    assert [(message.role, message.content) for message in played.messages] == [
        ("user", "hello"), ("assistant", "HELLO")
    ]  # fmt: skip
    assert (played.last_text, played.stop) == ("HELLO", "stop")
    (row,) = played.rows
    assert row.text.startswith("<|im_start|>user\nhello<|im_end|>")
    drawn = [id for id, mask in zip(row.token_ids, row.loss_mask, strict=True) if mask]
    assert len(drawn) == played.rollout.num_tokens == len("HELLO") + 1


async def test_a_script_gets_the_whole_conversation() -> None:
    seen: list[PolicyPrompt] = []

    def answer(prompt: PolicyPrompt) -> str:
        seen.append(prompt)
        if prompt.last_text == "hello":
            return (
                "wait"
                + call("is_it_open")
                + call("copy", text="ab\n\n")
                + call("copy", texts="x")
            )
        return "HELLO"

    played = await testing.play(WithTools(), TASK, answer)
    assert played.reward == 1.0
    assert [prompt.tools for prompt in seen] == 2 * [("is_it_open", "copy")]
    assert [prompt.first_text for prompt in seen] == ["hello", "hello"]
    assert [(message.role, message.content) for message in seen[0].messages] == [
        ("system", "Be brief."), ("user", "hello")
    ]  # fmt: skip
    assert seen[1].results[:2] == ("true", "ab\n\nab\n\n")
    assert seen[1].results[2].startswith("error: the arguments of copy are wrong: Object")
    assert seen[1].messages[2].content.startswith("wait<tool_call>")
    assert [message.role for message in seen[1].messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
        "tool",
    ]


async def test_an_answer_may_be_async_and_may_be_cut_short() -> None:
    async def slowly(prompt: PolicyPrompt) -> str:
        await asyncio.sleep(0.001)
        return loud(prompt)

    assert (await testing.play(Base(), TASK, slowly)).reward == 1.0
    cut = await testing.play(Base(), TASK, slowly, max_tokens=3)
    assert (cut.last_text, cut.stop, cut.reward) == ("HEL", "length", 0.0)


class Plain(WithTools):
    """Everything without async."""

    def rollout(self, task: rw.Task, chat: Any) -> None:  # type: ignore[override]
        assert chat.say("hello").text == "HELLO"
        chat.info["tools"] = list(chat.tools)
        child = chat.child("child", tools=chat.tools)
        chat.info["child"] = [child.last_text, len(child.messages)]

    @rw.update
    def again(self, task: rw.Task, chat: Any) -> None:
        chat.act("hello")


async def test_plain_code_can_use_its_chat() -> None:
    def answer(prompt: PolicyPrompt) -> str:
        if prompt.last_text == "child":
            return call("copy", text="ab")
        return loud(prompt)

    played = await testing.play(Plain(), TASK, answer)
    assert played.rollout.info == {"tools": ["Desk"], "child": ["ABAB", 4]}
    assert (played.reward, played.rollout.num_turns, len(played.rows)) == (1.0, 4, 2)


class StopsPlain(Plain):
    max_turns = 2


async def test_limits_end_plain_code() -> None:
    played = await testing.play(StopsPlain(), TASK, loud)
    assert (played.stop, played.rollout.num_turns) == ("max_turns", 2)


class Ranked(Base):
    @rw.group_reward(weight=0.5)
    def longest(self, task: rw.Task, rollouts: list[rw.Rollout]) -> list[float]:
        most = max(len(rollout.last_text) for rollout in rollouts)
        return [float(len(rollout.last_text) == most) for rollout in rollouts]

    @rw.group_reward
    async def size(self, task: rw.Task, rollouts: list[rw.Rollout]) -> list[float]:
        return [float(len(rollouts)) for _ in rollouts]


async def test_a_group_is_scored_together() -> None:
    first, second = await testing.play_group(
        Ranked(), TASK, [loud, lambda prompt: "longer words"]
    )
    assert (first.rewards, first.reward) == ({"exact": 1.0, "longest": 0.0, "size": 2.0}, 3.0)
    assert (second.rewards, second.reward) == (
        {"exact": 0.0, "longest": 1.0, "size": 2.0},
        2.5,
    )
    assert (await testing.play(Ranked(), TASK, loud)).rewards["size"] == 1.0


class Notes(Base):
    """Notes something on itself, which a reward in another process does not see."""

    noted = False

    async def rollout(self, task: rw.Task, chat: rw.Chat) -> None:
        self.noted = True
        await chat.say(task.prompt)

    @rw.metric
    def sees_note(self, task: rw.Task, rollout: rw.Rollout) -> float:
        return float(self.noted)


async def test_plain_rewards_have_their_own_copy_of_the_environment_as_in_a_worker() -> None:
    env = Notes()
    assert (await testing.play(env, TASK, loud)).metrics == {"sees_note": 0.0}
    assert env.noted


class Uncopyable(Notes):
    def __deepcopy__(self, memo: object) -> "Uncopyable":
        raise TypeError("a connection exists once")


async def test_an_author_is_warned_of_an_environment_that_cannot_be_copied() -> None:
    with pytest.warns(
        UserWarning, match=r"Uncopyable cannot be copied .*a connection exists once"
    ):
        played = await testing.play(Uncopyable(), TASK, loud)
    assert played.metrics == {"sees_note": 1.0}, "plain code shares the environment"


async def test_a_stage_restores_the_loops_task_factory() -> None:
    loop = asyncio.get_running_loop()
    first, second = testing.Stage(Base()), testing.Stage(Base())
    await first.__aenter__()
    await second.__aenter__()
    await first.__aexit__(None, None, None)
    assert loop.get_task_factory() is not None, "the other stage is still open"
    await second.__aexit__(None, None, None)
    assert loop.get_task_factory() is None


async def test_a_stage_leaves_another_task_factory_alone() -> None:
    def factory(
        loop: asyncio.AbstractEventLoop, coro: Any, **options: Any
    ) -> "asyncio.Task[Any]":
        return asyncio.Task(coro, loop=loop, **options)

    loop = asyncio.get_running_loop()
    loop.set_task_factory(factory)
    try:
        async with testing.Stage(Base()):
            assert loop.get_task_factory() is factory
        assert loop.get_task_factory() is factory
    finally:
        loop.set_task_factory(None)


async def test_a_played_rollout_prints_in_a_few_lines() -> None:
    played = await testing.play(Base(), TASK, lambda prompt: "HELLO" + 500 * "!")
    assert len(repr(played)) < 300
    assert "reward=0, rewards={'exact': 0.0}" in repr(played)
    assert "1 turns, 506 tokens drawn, 1 rows, stop='stop', last_text='HELLO!!!" in repr(
        played
    )
    (row,) = played.rows
    assert len(repr(row)) < 150
    assert f"{len(row.token_ids)} tokens, 506 drawn by the policy, '<|im_start|>user" in repr(
        row
    )


class Unsendable(Base):
    async def rollout(self, task: rw.Task, chat: rw.Chat) -> None:
        await chat.say(task.prompt)
        chat.info["later"] = lambda: 1


async def test_notes_that_cannot_be_pickled_are_refused_as_in_a_worker() -> None:
    with pytest.raises(testing.RolloutFailed, match="pickle"):
        await testing.play(Unsendable(), TASK, loud)


class Shared(Base):
    opened: list[str]

    def tools(self, task: rw.Task) -> list[rw.Toolset]:
        return [Log(self.opened)]


class Log(rw.Toolset):
    scope = "worker"

    def __init__(self, log: list[str]) -> None:
        self.log = log

    async def __aenter__(self) -> "Log":
        self.log.append("open")
        return self

    async def __aexit__(self, *_: Any) -> None:
        self.log.append("close")


async def test_toolsets_of_a_worker_close_with_the_stage() -> None:
    env = Shared()
    env.opened = []
    async with (
        testing.scripted_engine(loud) as engine,
        open_engine(EngineAccess(engine.url, deadline_s=10), WITH_ROUTES) as client,
        testing.Stage(env) as stage,
    ):
        await asyncio.gather(*(stage.play(TASK, client) for _ in range(3)))
        assert env.opened == ["open"]
    assert env.opened == ["open", "close"]


class Raises(Base):
    async def rollout(self, task: rw.Task, chat: rw.Chat) -> None:
        await chat.say(task.prompt)
        raise KeyError("no such thing")


class RaisesPlain(Base):
    def rollout(self, task: rw.Task, chat: Any) -> None:  # type: ignore[override]
        raise KeyError("no such thing")


class RaisingReward(Base):
    @rw.reward
    def exact(self, task: rw.Task, rollout: rw.Rollout) -> float:
        raise KeyError("no such thing")


class SlowReward(Base):
    @rw.reward
    def exact(self, task: rw.Task, rollout: rw.Rollout) -> float:
        time.sleep(0.3)
        return 1.0


class SlowAsyncReward(Base):
    @rw.reward
    async def exact(self, task: rw.Task, rollout: rw.Rollout) -> float:
        await asyncio.sleep(60)
        return 1.0


class TimesOut(Base):
    @rw.reward
    async def exact(self, task: rw.Task, rollout: rw.Rollout) -> float:
        raise TimeoutError("the judge is late")


class TimesOutInGroup(Base):
    @rw.group_reward
    async def rank(self, task: rw.Task, rollouts: list[rw.Rollout]) -> list[float]:
        raise TimeoutError("the judge is late")


class Sleeps(Base):
    async def rollout(self, task: rw.Task, chat: rw.Chat) -> None:
        await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("env", "boundary", "text"),
    [
        (Raises(), "env", "KeyError: 'no such thing', at " + __file__),
        (RaisesPlain(), "env", "KeyError: 'no such thing', at " + __file__),
        (RaisingReward(), "scorer", "no such thing"),
        (SlowReward(), "scorer", "ran longer than 0.1 s"),
        (SlowAsyncReward(), "scorer", "scoring ran longer than 0.1 s"),
        (TimesOut(), "scorer", "TimeoutError: the judge is late, at " + __file__),
        (TimesOutInGroup(), "scorer", "TimeoutError: the judge is late, at " + __file__),
        (Sleeps(), "deadline", "the rollout ran longer than 0.1 s, at " + __file__),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, rw.Environment) else None,
)
async def test_a_failure_names_its_boundary_and_its_error(
    env: rw.Environment, boundary: str, text: str
) -> None:
    limits = {
        "scoring_deadline_s": 0.1 if isinstance(env, SlowReward | SlowAsyncReward) else 30,
        "rollout_deadline_s": 0.1 if isinstance(env, Sleeps) else 30,
    }
    with pytest.raises(testing.RolloutFailed) as failure:
        await testing.play(env, TASK, loud, **limits)
    assert failure.value.boundary == boundary
    assert text in str(failure.value)
    if "Error(" in text:
        assert "test_play.py" in failure.value.traceback


async def test_an_error_of_the_script_is_raised_unchanged() -> None:
    with pytest.raises(ZeroDivisionError):
        await testing.play(Base(), TASK, lambda prompt: str(1 / 0))
    with pytest.raises(TypeError, match="the answer to 'hello' is 3, not a string"):
        await testing.play(Base(), TASK, lambda prompt: 3)  # type: ignore[arg-type,return-value]


class NoReward(rw.Environment):
    def tasks(self) -> Iterator[rw.Task]:
        return iter([])


async def test_a_bad_environment_or_limit_is_refused() -> None:
    with pytest.raises(
        EnvironmentInvalid, match=r"has no reward; mark at least one method with @rw\.reward"
    ):
        await testing.play(NoReward(), TASK, loud)
    with pytest.raises(ValueError, match="unknown field `rollout_deadline`"):
        await testing.play(Base(), TASK, loud, rollout_deadline=1.0)


def test_it_needs_neither_torch_nor_a_running_event_loop() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "import asyncio, rollway as rw; assert 'rollway.testing' not in sys.modules\n"
        "from rollway import testing\n"
        "env = rw.load_environment('rollway.envs.builtin.reverse_text')\n"
        "answer = lambda prompt: prompt.last_text.split()[-1][::-1]\n"
        "print(asyncio.run(testing.play(env, next(env.tasks()), answer)).reward)"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True
    )
    assert (result.stdout, result.stderr) == ("1.0\n", "")


class Endless(Base):
    """Talks on and on, and notes how much room is left."""

    async def rollout(self, task: rw.Task, chat: rw.Chat) -> None:
        chat.info["left"] = [chat.tokens_left]
        while True:
            await chat.say("more")
            chat.info["left"].append(chat.tokens_left)


class PlainEndless(Base):
    def rollout(self, task: rw.Task, chat: Any) -> None:
        while chat.tokens_left > 40:
            chat.say("more")


class Wordy(Base):
    async def rollout(self, task: rw.Task, chat: rw.Chat) -> None:
        await chat.say("word " * 100)


async def test_a_full_context_ends_a_rollout_and_does_not_fail_it() -> None:
    played = await testing.play(Endless(), TASK, loud, max_context=100)
    left = played.rollout.info["left"]
    assert played.stop == "context"
    assert left[0] == 100
    assert all(later < earlier for earlier, later in itertools.pairwise(left))
    (row,) = played.rows
    assert len(row.token_ids) == 100 - left[-1]
    assert len(row.token_ids) <= 100


async def test_the_last_reply_gets_what_is_left_of_the_context() -> None:
    played = await testing.play(Endless(), TASK, lambda prompt: "x" * 500, max_context=100)
    assert played.stop == "context"
    assert played.rollout.num_turns == 1
    assert len(played.rows[0].token_ids) == 100


async def test_plain_code_can_stop_in_time() -> None:
    played = await testing.play(PlainEndless(), TASK, loud, max_context=200)
    assert played.stop == "stop"
    assert played.rollout.num_turns > 1


async def test_a_first_prompt_that_does_not_fit_fails_with_the_figures() -> None:
    with pytest.raises(
        testing.RolloutFailed,
        match=r"env: the first prompt has 100 tokens or more, and .* 100",
    ):
        await testing.play(Wordy(), TASK, loud, max_context=100)
