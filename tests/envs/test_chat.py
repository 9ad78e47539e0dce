"""A chat with a scripted speaker: turns, tools, stops, children."""

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

import pytest

import rollway as rw
from rollway.envs.chat import StopReason, never_stop, stop_in
from rollway.envs.plain_chat import ChatState, PlainChat
from rollway.envs.toolbox import Toolbox
from rollway.envs.tools import Toolset
from rollway.errors import EnvironmentInvalid, ToolFailed
from rollway.records.task import CalledFunction, Message, ToolCall

pytestmark = pytest.mark.anyio


class Parrot:
    """Says in capitals what it hears; `call NAME ARGUMENTS` makes it call a tool."""

    def __init__(self) -> None:
        self.heard: list[list[str]] = []
        self.tools: list[Sequence[dict[str, Any]]] = []

    async def generate(
        self, messages: list[Message], tools: Sequence[dict[str, Any]]
    ) -> rw.Reply:
        self.heard.append([message.content for message in messages])
        self.tools.append(tools)
        last = messages[-1].content
        calls = [line.split(" ", 2) for line in last.splitlines() if line.startswith("call ")]
        made = tuple(
            ToolCall(f"c{index}", CalledFunction(name, arguments))
            for index, (_, name, arguments) in enumerate(calls)
        )
        bad = tuple(line for line in last.splitlines() if line.startswith("cal "))
        return rw.Reply(last.upper(), "stop", 3, tool_calls=made, malformed_calls=bad)

    def child(self) -> "Parrot":
        return Parrot()

    aside = child


class Sums(rw.Toolset):
    def __init__(self) -> None:
        self.at_once = self.most_at_once = 0

    @rw.tool
    async def add(self, a: int, b: int = 1) -> int:
        """Add two numbers."""
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        await asyncio.sleep(0.01)
        self.at_once -= 1
        return a + b

    @rw.tool
    async def break_down(self) -> str:
        raise KeyError("broken")

    @rw.tool
    def twice(self, text: str) -> list[str]:
        return [text, text]


class Strict(Sums):
    errors = "fail"


class Slow(rw.Toolset):
    @rw.tool
    async def wait(self) -> None:
        await asyncio.sleep(60)


def chat_with(
    *toolsets: Toolset,
    stop_reason: StopReason = never_stop,
    deadline_s: float = 5,
    system_prompt: str = "",
) -> tuple[rw.Chat, Parrot]:
    async def call_plain(name: str, arguments: dict[str, Any]) -> Any:
        owner = next(toolset for toolset in toolsets if hasattr(toolset, name))
        return getattr(owner, name)(**arguments)

    parrot = Parrot()
    toolbox = Toolbox(toolsets, call_plain, deadline_s)
    return rw.Chat(parrot, toolbox, stop_reason, system_prompt=system_prompt), parrot


async def test_a_chat_keeps_its_messages() -> None:
    chat, _ = chat_with(system_prompt="be loud")
    assert (await chat.say("hello")).text == "HELLO"
    assert (await chat.say("bye")).text == "BYE"
    assert [(message.role, message.content) for message in chat.messages] == [
        ("system", "be loud"), ("user", "hello"), ("assistant", "HELLO"), ("user", "bye"),
        ("assistant", "BYE"),
    ]  # fmt: skip
    assert chat.last_text == "BYE"
    with pytest.raises(TypeError, match="takes a string"):
        await chat.say(3)  # type: ignore[arg-type]


async def test_tools_have_a_schema_from_their_type_hints() -> None:
    chat, parrot = chat_with(Sums())
    await chat.say("hello")
    schema = {tool["function"]["name"]: tool["function"] for tool in parrot.tools[0]}
    assert schema["add"]["description"] == "Add two numbers."
    assert schema["add"]["parameters"] == {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "default": 1}},
        "required": ["a"],
    }
    assert schema["break_down"]["parameters"]["properties"] == {}


async def test_several_calls_run_at_the_same_time_and_answer_in_order() -> None:
    sums = Sums()
    chat, parrot = chat_with(sums)
    reply = await chat.act(
        'call add {"a": 1, "b": 2}\ncall add {"a": 5}\ncall twice {"text": "x"}'
    )
    assert [message.content for message in chat.messages if message.role == "tool"] == [
        "3",
        "6",
        '["x","x"]',
    ]
    assert [message.tool_call_id for message in chat.messages if message.role == "tool"] == [
        "c0",
        "c1",
        "c2",
    ]
    assert sums.most_at_once == 2
    assert reply.text == '["X","X"]'
    assert len(parrot.heard) == 2


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "call subtract {}",
            "no tool is called 'subtract'; the tools are: add, break_down, twice",
        ),
        ('call add {"a": "one"}', "the arguments of add are wrong: Expected `int`"),
        ("call add {}", "missing required field `a`"),
        ('call add {"a": 1, "c": 2}', "unknown field `c`"),
        ("call add {", "the arguments of add are wrong: Input data was truncated"),
        ("call break_down {}", "error: KeyError: 'broken'"),
        (
            "cal add",
            "this tool call cannot be read; write it again in the right format: cal add",
        ),
    ],
)
async def test_the_policy_reads_what_is_wrong_with_its_call(text: str, error: str) -> None:
    chat, _ = chat_with(Sums())
    await chat.say(text)
    (answer,) = await chat.call_tools()
    assert answer.content.startswith("error: ")
    assert error in answer.content


async def test_a_toolset_may_choose_that_an_error_fails_the_rollout() -> None:
    chat, _ = chat_with(Strict())
    with pytest.raises(ToolFailed, match="tool break_down: KeyError: 'broken'"):
        await chat.act('call break_down {}\ncall add {"a": 1}')


async def test_a_tool_has_a_deadline() -> None:
    chat, _ = chat_with(Slow(), deadline_s=0.05)
    await chat.say("call wait {}")
    (answer,) = await chat.call_tools()
    assert answer.content == "error: wait took longer than 0.05 s"


async def test_a_reason_to_stop_is_asked_for_before_every_turn_of_the_chat_and_its_children() -> (
    None
):
    seen: list[tuple[bool, int]] = []

    def stop_reason(chat: rw.Chat) -> str:
        seen.append((chat.is_child, len(chat.replies)))
        return "max_turns" if len(seen) > 3 else ""

    chat, _ = chat_with(stop_reason=stop_reason)
    await chat.say("one")
    await chat.child("two")
    await chat.go_on()
    with pytest.raises(rw.Stopped, match="max_turns"):
        await chat.say("four")
    assert seen == [(False, 0), (True, 0), (False, 1), (False, 2)]
    assert [message.content for message in chat.messages] == ["one", "ONE", "ONE"], (
        "'four' is not said"
    )


async def test_an_aside_has_the_tools_and_a_copy_of_the_notes_but_no_reason_to_stop() -> None:
    sums = Sums()
    chat, _ = chat_with(sums, stop_reason=lambda chat: "always")
    chat.info["note"] = 1
    aside = chat.aside()
    aside.info["note"] = 2
    await aside.say("hello")
    assert (aside.tools, aside.last_text) == ((sums,), "HELLO")
    assert (chat.messages, chat.info) == ([], {"note": 1})


def test_a_stop_is_found_in_groups_of_nothing_else() -> None:
    first, second = rw.Stopped("max_turns"), rw.Stopped("max_rollout_tokens")
    assert stop_in(first) == "max_turns"
    assert (
        stop_in(ExceptionGroup("", [ExceptionGroup("", [second]), first]))
        == "max_rollout_tokens"
    )
    assert stop_in(ExceptionGroup("", [first, KeyError("broken")])) == ""
    assert stop_in(KeyError("broken")) == ""


async def test_a_child_borrows_tools_that_are_open_and_no_others() -> None:
    sums = Sums()
    chat, parrot = chat_with(sums)
    child = await chat.child('call add {"a": 1}', tools=chat.tools, system_prompt="help")
    assert child.last_text == "2"
    assert [message.role for message in child.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert chat.messages == []
    assert parrot.heard == []
    without = await chat.child('call add {"a": 1}')
    assert "no tool is called 'add'" in without.messages[2].content
    with pytest.raises(ValueError, match="Sums is not open in this chat"):
        await chat.child("hello", tools=[Sums()])


def test_a_child_of_plain_code_borrows_tools_by_name_and_no_others() -> None:
    chat = PlainChat(lambda call: call.state, ChatState((), (), {}, ("Sums",)))
    chat.child("hello", tools=["Sums"])
    with pytest.raises(ValueError, match="Sum is not open in this chat"):
        chat.child("hello", tools=["Sums", "Sum"])
    with pytest.raises(TypeError, match="takes a list of names as tools, not 'Sums'"):
        chat.child("hello", tools="Sums")


def bad_toolset(kind: Literal["untyped", "star", "odd", "selfless"]) -> rw.Toolset:
    class Untyped(rw.Toolset):
        @rw.tool
        def go(self, where) -> None:  # type: ignore[no-untyped-def]
            pass

    class Star(rw.Toolset):
        @rw.tool
        def go(self, *where: str) -> None:
            pass

    class Odd(rw.Toolset):
        @rw.tool
        def go(self, where: "asyncio.Future[int]") -> None:
            pass

    class Selfless(rw.Toolset):
        @rw.tool
        def go() -> None:  # type: ignore[misc]
            pass

    kinds = {"untyped": Untyped, "star": Star, "odd": Odd, "selfless": Selfless}
    return kinds[kind]()


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("untyped", "'where' needs a type hint"),
        ("star", "name each argument"),
        ("odd", "tool Odd.go"),
        ("selfless", "tool Selfless.go: its first argument must be 'self'"),
    ],
)
def test_tools_without_a_schema_are_refused(kind: Any, error: str) -> None:
    with pytest.raises(EnvironmentInvalid, match=error):
        chat_with(bad_toolset(kind))
