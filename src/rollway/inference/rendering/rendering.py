"""Messages to token ids and back, by the model family's renderer."""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pydantic
import renderers
import renderers.base

from ...config.sections import ModelConfig
from ...errors import ConfigError, ModelError, did_you_mean
from ...loop.lanes.lanes import Lane
from ...records.task import CalledFunction, Message, ToolCall
from ...records.turn import Ints
from .tokenizer import Tokenizer

INLINE_CHARS = 4_000
"""Texts up to this length are rendered on the loop, in well under a millisecond."""
SEEN_TOKENS = 256
"""How much of a prompt a renderer is shown to extend it: it looks for how the last turn began."""
LANE_DEADLINE_S = 60.0
OK = renderers.base.ToolCallParseStatus.OK
WITH_CHAT_TEMPLATE = ("auto", "default")
"""Renderers that may run the model's own chat template, for which transformers is needed."""


Tools = Sequence[dict[str, Any]]
"""What the policy may call, in the shape chat APIs use."""


class ParsedReply(msgspec.Struct, frozen=True):
    """A reply's text, the reasoning that came before it, and the tool calls in it."""

    content: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...] = ()
    malformed_calls: tuple[str, ...] = ()


class SyncRenderer:
    """One model's renderer. Synchronous: see `Renderer` for what a loop calls."""

    def __init__(self, model: ModelConfig) -> None:
        if model.renderer in WITH_CHAT_TEMPLATE:
            tokenizer: Any = _full_tokenizer(model.path)
        else:
            tokenizer = Tokenizer(model.path)
        config = _renderer_config(model)
        extra = model.template if config is None else None
        try:
            self._renderer = renderers.create_renderer(tokenizer, config, chat_template_kwargs=extra)
        except (AssertionError, ValueError) as error:
            raise ModelError(
                f"renderer '{model.renderer}' does not fit the tokenizer of '{model.path}': {error}"
            ) from None
        self.stop_ids: list[int] = list(self._renderer.get_stop_token_ids())

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """The ids of a whole conversation, up to where the policy starts to speak."""
        ids = self._renderer.render_ids(
            _dicts(messages), tools=list(tools) or None, add_generation_prompt=True
        )
        return list(ids)

    def extend(
        self, prompt_ids: list[int], completion_ids: list[int], new: Sequence[Message],
        tools: Tools = (),
    ) -> list[int] | None:  # fmt: skip
        """The next prompt as the last one, the ids drawn, and new messages; None if it cannot be."""
        bridged = self._renderer.bridge_to_next_turn(
            prompt_ids, completion_ids, _dicts(new), tools=list(tools) or None
        )
        return None if bridged is None else list(bridged.token_ids)

    def parse(self, completion_ids: list[int], tools: Tools = ()) -> ParsedReply:
        """What was drawn, as text and calls. Without tools what looks like a call is just text."""
        parsed = self._renderer.parse_response(completion_ids, tools=list(tools) or None)
        if not tools:
            return ParsedReply(_with_calls(parsed), parsed.reasoning_content)
        good = [one for one in parsed.tool_calls if one.status == OK and one.name]
        calls = tuple(_tool_call(index, one) for index, one in enumerate(good))
        bad = tuple(one.raw for one in parsed.tool_calls if one not in good)
        return ParsedReply(parsed.content, parsed.reasoning_content, calls, bad)


def _tool_call(index: int, parsed: Any) -> ToolCall:
    given = parsed.arguments
    arguments = given if isinstance(given, str) else msgspec.json.encode(given or {}).decode()
    return ToolCall(parsed.id or f"call_{index}", CalledFunction(parsed.name, arguments))


def _with_calls(parsed: Any) -> str:
    """The text of a reply, with what a parser took for calls."""
    return "\n".join([*[parsed.content] * bool(parsed.content), *(one.raw for one in parsed.tool_calls)])


class Renderer:
    """A model's rendering for use on a loop: short texts at once, long ones in the process lane."""

    def __init__(self, here: SyncRenderer, model: ModelConfig, lane: Lane) -> None:
        self._here = here
        self._model = msgspec.json.encode(model)
        self._lane = lane

    @property
    def stop_ids(self) -> list[int]:
        return self._here.stop_ids

    async def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        if _num_chars(messages) <= INLINE_CHARS:
            return self._here.prompt(messages, tools)
        return await self._lane.call(
            _prompt_in_lane, self._model, tuple(messages), tuple(tools), deadline_s=LANE_DEADLINE_S
        )

    async def extend(
        self, prompt_ids: Ints, completion_ids: Ints, new: Sequence[Message], tools: Tools = ()
    ) -> Ints | None:
        """The next prompt. A renderer sees the end of a long one only: earlier turns are closed."""
        cut = max(0, len(prompt_ids) - SEEN_TOKENS)
        seen, drawn = prompt_ids[cut:].tolist(), completion_ids.tolist()
        if _num_chars(new) + len(drawn) <= INLINE_CHARS:
            extended = self._here.extend(seen, drawn, new, tools)
        else:
            extended = await self._lane.call(
                _extend_in_lane, self._model, seen, drawn, tuple(new), tuple(tools),
                deadline_s=LANE_DEADLINE_S,
            )  # fmt: skip
        if extended is None:
            return None
        return np.concatenate([prompt_ids[:cut], np.array(extended, np.int32)])

    async def parse(self, completion_ids: list[int], tools: Tools = ()) -> ParsedReply:
        if len(completion_ids) <= INLINE_CHARS:
            return self._here.parse(completion_ids, tools)
        return await self._lane.call(
            _parse_in_lane, self._model, completion_ids, tuple(tools), deadline_s=LANE_DEADLINE_S
        )


def _num_chars(messages: Sequence[Message]) -> int:
    return sum(len(one.content) for one in messages)


@cache
def _rendering(model: bytes) -> SyncRenderer:
    return SyncRenderer(msgspec.json.decode(model, type=ModelConfig))


def _prompt_in_lane(model: bytes, messages: Sequence[Message], tools: Tools) -> list[int]:
    return _rendering(model).prompt(messages, tools)


def _extend_in_lane(
    model: bytes, prompt_ids: list[int], completion_ids: list[int], new: Sequence[Message], tools: Tools
) -> list[int] | None:
    return _rendering(model).extend(prompt_ids, completion_ids, new, tools)


def _parse_in_lane(model: bytes, completion_ids: list[int], tools: Tools) -> ParsedReply:
    return _rendering(model).parse(completion_ids, tools)


def _renderer_config(model: ModelConfig) -> Any:
    """The typed options of the renderer that the config names; None lets the model's name decide."""
    try:
        default = renderers.config_from_name(model.renderer)
    except ValueError as error:
        known = re.findall(r"'([^']+)'", str(error).partition("Known:")[2])
        hint = did_you_mean(model.renderer, known) or f"; known: {', '.join(known)}"
        raise ConfigError(f"no renderer '{model.renderer}' for 'model.renderer'{hint}") from None
    try:
        return None if default is None else type(default)(**model.template)
    except pydantic.ValidationError as error:
        wrong = error.errors()[0]
        key = ".".join(str(part) for part in wrong["loc"])
        hint = did_you_mean(key, type(default).model_fields)
        raise ConfigError(f"'model.template.{key}': {wrong['msg'].lower()}{hint}") from None


def _full_tokenizer(path: str) -> Any:
    try:
        return renderers.base.load_tokenizer(path)
    except ImportError:
        raise ModelError(
            f"model '{path}' is rendered by its chat template, which needs transformers: "
            "pip install 'rollway[local]', or name its family in 'model.renderer'"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read the tokenizer of model '{path}': {error}") from None


def _dicts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    built: list[dict[str, Any]] = msgspec.to_builtins(list(messages))
    return built
