"""Renders messages to token ids and back, with the renderer of the model's family."""

import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pydantic

from ...config.sections import ModelConfig
from ...errors import ConfigError, EngineError, LaneError, ModelError, did_you_mean
from ...loop.lanes.lanes import Lane
from ...records.task import CalledFunction, Message, ToolCall
from ...records.turn import Ints
from .library import renderers
from .tokenizer import Tokenizer

INLINE_CHARS = 4_000
"""Texts up to this length are rendered on the loop, in well under a millisecond."""
TAIL_TOKENS = 256
"""How much of a prompt's end a renderer gets to extend it: enough to find where the last turn began."""
LANE_DEADLINE_S = 60.0
OK = renderers.base.ToolCallParseStatus.OK
WITH_CHAT_TEMPLATE = ("auto", "default")
"""Renderers that may run the model's chat template, which needs transformers."""
T = TypeVar("T")
Tools = Sequence[dict[str, Any]]
"""The tools that the policy may call, in the shape of chat APIs."""


class ParsedReply(msgspec.Struct, frozen=True):
    """A reply's text, the reasoning before it, and the tool calls in it."""

    content: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...] = ()
    malformed_calls: tuple[str, ...] = ()


class SyncRenderer:
    """Renders in the calling thread and blocks it. An event loop uses `Renderer`."""

    def __init__(self, model: ModelConfig) -> None:
        name, path = model.renderer, model.path
        open_tokenizer = _full_tokenizer if name in WITH_CHAT_TEMPLATE else Tokenizer
        tokenizer = self._tokenizer = open_tokenizer(path)
        config = _renderer_config(model)
        options = model.template if config is None else None
        try:
            self._renderer = renderers.create_renderer(
                tokenizer, config, chat_template_kwargs=options
            )
        except (AssertionError, ValueError) as error:
            problem = f"renderer '{name}' does not fit the tokenizer of '{path}'"
            raise ModelError(f"{problem}: {error}") from None
        self.stop_ids: list[int] = list(self._renderer.get_stop_token_ids())
        self.reads_tool_calls: bool = getattr(self._renderer, "supports_tools", True)
        """Whether it finds tool calls in replies. Renderers of model families always do."""

    @property
    def tool_parsers(self) -> tuple[str, ...]:
        """The syntaxes of tool calls that the renderer `default` can be told to read."""
        return tuple(sorted(renderers.parsers.TOOL_PARSERS))

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Return the ids of a whole conversation, up to where the policy starts to speak."""
        dicts, given = _dicts(messages), list(tools) or None
        return list(self._renderer.render_ids(dicts, tools=given, add_generation_prompt=True))

    def extend(
        self,
        prompt_ids: list[int],
        completion_ids: list[int],
        new: Sequence[Message],
        tools: Tools = (),
    ) -> list[int] | None:
        """Return the last prompt, the drawn ids and the new messages as the next prompt. None means that
        this renderer cannot extend prompts: the whole conversation must be rendered again."""
        bridge, given = self._renderer.bridge_to_next_turn, list(tools) or None
        bridged = bridge(prompt_ids, completion_ids, _dicts(new), tools=given)
        return None if bridged is None else list(bridged.token_ids)

    def split(
        self,
        messages: Sequence[Message],
        reply: Message,
        tools: Tools = (),
        *,
        is_whole: bool,
    ) -> tuple[list[int], list[int]]:
        """Return the ids that ask for a reply, and those of the reply, as the chat template writes them.
        Of what the template writes for the reply, the part that already stands in the prompt is left
        out. The reply ends with a stop token if it is whole. Raise ModelError if it would not be what
        was said."""
        given = list(tools) or None
        rendered = self._renderer.render(_dicts([*messages, reply]), tools=given)
        base = list(self._renderer.render_ids(_dicts(messages), tools=given))
        asked, ids = self.prompt(messages, tools), list(rendered.token_ids)
        if ids[: len(base)] == base:
            own = ids[len(base) :]
        elif rendered.sampled_mask:  # the renderer knows which tokens belong to which message
            last = len(messages)
            pairs = zip(ids, rendered.message_indices, strict=True)
            own = [token for token, index in pairs if index == last]
        else:
            raise ModelError(
                "after a reply the chat template writes earlier turns in another way"
            )
        pairs = zip(own, asked[len(base) :], strict=False)
        start = next(
            (at for at, (a, b) in enumerate(pairs) if a != b), len(asked) - len(base)
        )
        stops = (at for at in range(start, len(own)) if own[at] in self.stop_ids)
        drawn = own[start : next(stops, len(own)) + is_whole]
        self._check_said(reply, drawn)
        return asked[: len(base) + start], drawn

    def _check_said(self, reply: Message, drawn: list[int]) -> None:
        """Raise ModelError if the template left out a part of a reply, such as its reasoning."""
        text = "".join(self.decode(drawn).split())
        for part in (reply.reasoning_content, reply.content):
            if part and "".join(part.split()) not in text:
                raise ModelError(
                    f"the chat template leaves out a part of the reply: {part.strip()[:80]!r}"
                )

    def parse(self, completion_ids: list[int], tools: Tools = ()) -> ParsedReply:
        """Parse drawn ids into text and tool calls. Without `tools`, calls are left in the text."""
        parsed = self._renderer.parse_response(completion_ids, tools=list(tools) or None)
        found = parsed.tool_calls
        if not tools:
            texts = [parsed.content] if parsed.content else []
            texts += [call.raw for call in found]
            return ParsedReply("\n".join(texts), parsed.reasoning_content)
        good = [call for call in found if call.status == OK and call.name]
        calls = tuple(_tool_call(index, call) for index, call in enumerate(good))
        malformed = tuple(call.raw for call in found if call not in good)
        return ParsedReply(parsed.content, parsed.reasoning_content, calls, malformed)


def _tool_call(index: int, parsed: Any) -> ToolCall:
    arguments = parsed.arguments
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments or {}).decode()
    return ToolCall(parsed.id or f"call_{index}", CalledFunction(parsed.name, arguments))


class Renderer:
    """Renders for an event loop: short texts at once, long ones in the process lane. Of a prompt that is
    longer than `most` tokens, which no engine takes, only the first `most + 1` come back."""

    def __init__(
        self, renderer: SyncRenderer, model: ModelConfig, lane: Lane, most: int = 0
    ) -> None:
        self._renderer = renderer
        self._model = msgspec.json.encode(model)
        self._lane = lane
        self.most = most
        """0 if it is not known how many tokens an engine takes."""
        self.stop_ids = renderer.stop_ids

    async def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> Ints:
        args = tuple(messages), tuple(tools), self.most
        if _num_chars(messages) <= INLINE_CHARS:
            return _prompt(self._renderer, *args)
        return await self._call_lane(_prompt, *args)

    async def extend(
        self,
        prompt_ids: Ints,
        completion_ids: Ints,
        new: Sequence[Message],
        tools: Tools = (),
    ) -> Ints | None:
        """Return the next prompt, or None, like `SyncRenderer.extend`. The renderer gets only the end of
        a long prompt, because earlier turns do not change."""
        tail = prompt_ids[max(0, len(prompt_ids) - TAIL_TOKENS) :]
        args = tail, completion_ids, tuple(new), tuple(tools), self.most
        if _num_chars(new) + len(completion_ids) <= INLINE_CHARS:
            added = _added(self._renderer, *args)
        else:
            added = await self._call_lane(_added, *args)
        return None if added is None else np.concatenate([prompt_ids, added])

    async def parse(self, completion_ids: Ints, tools: Tools = ()) -> ParsedReply:
        if len(completion_ids) <= INLINE_CHARS:
            return self._renderer.parse(completion_ids.tolist(), tools)
        return await self._call_lane(_parsed, completion_ids, tuple(tools))

    async def _call_lane(self, call: Callable[..., T], *args: Any) -> T:
        return await self._lane.call(
            _call_renderer, call, self._model, *args, deadline_s=LANE_DEADLINE_S
        )


# Ids pass to and from the lane as arrays: a list of a million would hold the loop while it is unpacked.


def _prompt(
    renderer: SyncRenderer, messages: Sequence[Message], tools: Tools, most: int
) -> Ints:
    return _first(renderer.prompt(messages, tools), most)


def _first(ids: list[int], most: int) -> Ints:
    return np.array(ids[: most + 1] if most else ids, np.int32)


def _added(
    renderer: SyncRenderer,
    tail: Ints,
    completion_ids: Ints,
    new: Sequence[Message],
    tools: Tools,
    most: int,
) -> Ints | None:
    """Return what follows on the end of a prompt; None if the renderer cannot extend prompts."""
    before = tail.tolist()
    extended = renderer.extend(before, completion_ids.tolist(), new, tools)
    if extended is None or extended[: len(before)] != before:
        return None
    return _first(extended[len(before) :], most)


def _parsed(renderer: SyncRenderer, completion_ids: Ints, tools: Tools) -> ParsedReply:
    return renderer.parse(completion_ids.tolist(), tools)


class ReplyTokenizer:
    """Makes the token ids of chat replies that came without them, always in the process lane."""

    def __init__(self, model: ModelConfig, lane: Lane) -> None:
        self._model = msgspec.json.encode(model)
        self._lane = lane

    async def split(
        self, messages: Sequence[Message], reply: Message, tools: Tools, *, is_whole: bool
    ) -> tuple[list[int], list[int]]:
        """Do the same as `SyncRenderer.split`. Raise EngineError if it cannot be done."""
        args = self._model, tuple(messages), reply, tuple(tools), is_whole
        try:
            return await self._lane.call(_split_reply, *args, deadline_s=LANE_DEADLINE_S)
        except LaneError as error:
            raise EngineError(f"the reply cannot be tokenised: {error}") from None


def _split_reply(
    model: bytes, messages: Sequence[Message], reply: Message, tools: Tools, is_whole: bool
) -> tuple[list[int], list[int]]:
    return _renderer_of(model).split(messages, reply, tools, is_whole=is_whole)


def _num_chars(messages: Sequence[Message]) -> int:
    return sum(len(message.content) for message in messages)


@cache
def _renderer_of(model: bytes) -> SyncRenderer:
    return SyncRenderer(msgspec.json.decode(model, type=ModelConfig))


def _call_renderer(call: Callable[..., T], model: bytes, *args: Any) -> T:
    return call(_renderer_of(model), *args)


def _renderer_config(model: ModelConfig) -> Any:
    """Return the typed options of the configured renderer. None lets the model's name decide."""
    try:
        default = renderers.config_from_name(model.renderer)
    except ValueError as error:
        names = re.findall(r"'([^']+)'", str(error).partition("Known:")[2])
        name = model.renderer
        hint = did_you_mean(name, names) or f"; choose one of {', '.join(names)}"
        raise ConfigError(f"no renderer '{name}' for 'model.renderer'{hint}") from None
    if default is None:
        return None
    options = [name for name in type(default).model_fields if name != "name"]
    for key in model.template:
        # the renderer `default` passes every option on to the chat template: only a slip is refused
        if key not in options and (hint := did_you_mean(key, options, cutoff=0.8)):
            raise ConfigError(f"unknown option 'model.template.{key}'{hint}")
    try:
        return type(default)(**model.template)
    except pydantic.ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"])
        text = problem["msg"].lower()
        if problem["type"] == "extra_forbidden":
            text = (
                f"renderer '{model.renderer}' has no such option, only {', '.join(options)}"
            )
        raise ConfigError(f"'model.template.{key}': {text}") from None


def _full_tokenizer(path: str) -> Any:
    try:
        return renderers.base.load_tokenizer(path)
    except ImportError:
        raise ModelError(
            f"model '{path}' is rendered by its chat template, which needs transformers: "
            "pip install 'rollway[local]', or name its family in 'model.renderer'"
        ) from None
    except Exception as error:  # of transformers, whatever is wrong with the files
        if not Path(path, "tokenizer.json").exists():
            raise ModelError(
                f"'{path}' has no tokenizer.json: copy it there from where the model comes from"
            ) from None
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ModelError(f"cannot read the tokenizer of model '{path}': {text}") from None


def _dicts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    built: list[dict[str, Any]] = msgspec.to_builtins(list(messages))
    return built
