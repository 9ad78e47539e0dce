"""Rendering messages to ids. Ids that were drawn are never encoded a second time."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rollway.config.sections import ModelConfig
from rollway.errors import ConfigError, ModelError
from rollway.inference.rendering.rendering import (
    INLINE_CHARS,
    TAIL_TOKENS,
    Renderer,
    ReplyTokenizer,
    SyncRenderer,
)
from rollway.inference.rendering.tokenizer import Tokenizer
from rollway.loop.lanes.lanes import ProcessLane
from rollway.records.task import CalledFunction, Message, ToolCall


def qwen3(folder: Path) -> ModelConfig:
    return ModelConfig(
        path=str(folder), renderer="qwen3", template={"enable_thinking": False}
    )


def test_a_prompt_ends_where_the_policy_starts_to_speak(tiny_moe: Path) -> None:
    text = Tokenizer(str(tiny_moe)).decode(
        SyncRenderer(qwen3(tiny_moe)).prompt([Message("user", "hi")])
    )
    assert (
        text
        == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


@pytest.mark.parametrize("ended", [True, False])
def test_the_next_prompt_repeats_the_drawn_ids(tiny_moe: Path, ended: bool) -> None:
    sync_renderer = SyncRenderer(qwen3(tiny_moe))
    prompt = sync_renderer.prompt([Message("user", "hi")])
    drawn = [5, 255, 17, 3] + (
        sync_renderer.stop_ids[:1] if ended else []
    )  # 255 alone is not valid UTF-8
    extended = sync_renderer.extend(prompt, drawn, [Message("user", "more")])
    assert extended is not None
    assert extended[: len(prompt) + len(drawn)] == prompt + drawn
    text = Tokenizer(str(tiny_moe)).decode(extended)
    assert text.endswith(
        "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_a_reply_is_parsed_without_its_stop_token(tiny_moe: Path) -> None:
    sync_renderer, tokenizer = SyncRenderer(qwen3(tiny_moe)), Tokenizer(str(tiny_moe))
    drawn = [*tokenizer.encode("olleh"), sync_renderer.stop_ids[0]]
    assert sync_renderer.parse(drawn).content == "olleh"


def test_the_default_renderer_runs_the_chat_template(tiny_moe: Path) -> None:
    messages = [Message("system", "be brief"), Message("user", "hi")]
    default = SyncRenderer(ModelConfig(path=str(tiny_moe), renderer="default"))
    assert default.prompt(messages) == SyncRenderer(qwen3(tiny_moe)).prompt(messages)
    assert default.extend([1], [2], messages) is None, (
        "a chat template cannot extend a prompt"
    )


@pytest.mark.anyio
async def test_long_texts_are_rendered_in_the_process_lane(tiny_moe: Path) -> None:
    async with ProcessLane("test", size=1) as lane:
        renderer = Renderer(SyncRenderer(qwen3(tiny_moe)), qwen3(tiny_moe), lane)
        long = [Message("user", "x" * (INLINE_CHARS + 1))]
        ids = await renderer.prompt(long)
        assert ids.tolist() == SyncRenderer(qwen3(tiny_moe)).prompt(long)
        extended = await renderer.extend(ids, np.array([7], np.int32), long)
        assert extended is not None
        assert extended[: len(ids) + 1].tolist() == [*ids, 7]
        assert (await renderer.parse(np.full(INLINE_CHARS + 1, 70, np.int32))).content


def test_an_error_names_the_wrong_renderer_or_option(tiny_moe: Path) -> None:
    path = str(tiny_moe)
    with pytest.raises(ConfigError, match=r"no renderer 'qwen33' .*did you mean 'qwen3'"):
        SyncRenderer(ModelConfig(path=path, renderer="qwen33"))
    with pytest.raises(
        ConfigError, match=r"model.template.enable_thinkin.*did you mean 'enable_thinking'"
    ):
        SyncRenderer(
            ModelConfig(path=path, renderer="qwen3", template={"enable_thinkin": True})
        )
    with pytest.raises(ModelError, match="does not fit the tokenizer"):
        SyncRenderer(ModelConfig(path=path, renderer="glm-5"))
    with pytest.raises(ModelError, match="cannot read the tokenizer"):
        SyncRenderer(ModelConfig(path=path + "/none", renderer="qwen3"))


@pytest.mark.anyio
async def test_a_long_prompt_is_extended_like_a_short_one(tiny_moe: Path) -> None:
    """The renderer gets only the end of a long prompt, and the result is the same."""
    sync_renderer = SyncRenderer(qwen3(tiny_moe))
    async with ProcessLane("test", size=1) as lane:
        renderer = Renderer(sync_renderer, qwen3(tiny_moe), lane)
        new = [Message("user", "more")]
        for chars in (10, TAIL_TOKENS - 40, TAIL_TOKENS + 3, 3 * TAIL_TOKENS):
            prompt = sync_renderer.prompt([Message("user", "x" * chars)])
            for drawn in ([5, 6, sync_renderer.stop_ids[0]], [5, 6]):
                prompt_ids, drawn_ids = np.array(prompt, np.int32), np.array(drawn, np.int32)
                extended = await renderer.extend(prompt_ids, drawn_ids, new)
                assert extended is not None
                assert extended.tolist() == sync_renderer.extend(prompt, drawn, new)


@pytest.mark.parametrize("renderer", ["qwen3", "default"])
@pytest.mark.parametrize("is_whole", [True, False])
def test_a_conversation_and_the_reply_to_it(
    tiny_moe: Path, renderer: str, is_whole: bool
) -> None:
    """The two parts are what the engine would have been sent, and what it would have drawn."""
    sync, tokenizer = (
        SyncRenderer(ModelConfig(path=str(tiny_moe), renderer=renderer)),
        Tokenizer(str(tiny_moe)),
    )
    messages, reply = [Message("user", "hi")], Message("assistant", "olleh")
    prompt, drawn = sync.split(messages, reply, is_whole=is_whole)
    asked = sync.prompt(messages)
    assert prompt == asked[: len(prompt)]
    text = tokenizer.decode(drawn)
    assert text.endswith("olleh" + "<|im_end|>" * is_whole)
    following = [*messages, reply, Message("user", "more")]
    if renderer == "default" and is_whole:
        assert sync.prompt(following)[: len(prompt + drawn)] == prompt + drawn


@pytest.mark.anyio
async def test_a_reply_with_reasoning_and_tool_calls_is_split_in_the_lane(
    tiny_moe: Path,
) -> None:
    call = ToolCall("1", CalledFunction("add", '{"a": 1}'))
    reply = Message("assistant", "", "let me add", (call,))
    async with ProcessLane("tokenise", 1) as lane:
        tokenizer = ReplyTokenizer(ModelConfig(path=str(tiny_moe), renderer="qwen3"), lane)
        _, drawn = await tokenizer.split([Message("user", "1 + 1")], reply, (), is_whole=True)
    text = Tokenizer(str(tiny_moe)).decode(drawn)
    assert "let me add" in text
    assert "<tool_call>" in text
    assert text.endswith("<|im_end|>")


def test_a_template_that_leaves_out_the_reasoning_is_refused(tiny_moe: Path) -> None:
    """What the reward was given for would not be trained."""
    sync = SyncRenderer(ModelConfig(path=str(tiny_moe), renderer="default"))
    reply = Message("assistant", "olleh", "backwards it is")
    with pytest.raises(ModelError, match="leaves out a part of the reply: 'backwards it is'"):
        sync.split([Message("user", "hi")], reply, is_whole=True)


WITHOUT_CLIENT = """
import sys
import rollway.inference.rendering.rendering
assert "openai" not in sys.modules
import renderers.client
assert renderers.client.AsyncOpenAI.__module__.startswith("openai")
"""


def test_renderers_are_imported_without_the_client_that_user_code_may_still_import() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_CLIENT], check=True)
