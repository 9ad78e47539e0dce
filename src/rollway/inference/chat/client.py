"""A client of OpenAI-compatible chat endpoints: messages in, a message out, no token ids."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from ...errors import UNREADABLE, EngineError
from ...records.task import CalledFunction, Message, ToolCall
from ...records.turn import Sampling
from ..engines.dialect import problem
from ..http.client import HttpClient
from ..http.endpoint import LATER, back_off_s, headers, pick, read_all, retry_after_s, served_models
from ..http.framing import HttpError, ReplyHead

PATH = "/chat/completions"
CHECK_DEADLINE_S = 30.0
BY_DEFAULT = {"temperature": 1.0, "top_p": 1.0}
"""What an endpoint that does not know a parameter does anyway: such a value need not be sent."""


class ChatReply(Struct, frozen=True):
    """What an endpoint answered, and the tokens it counted (0 where it does not count)."""

    content: str
    reasoning_content: str | None
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    num_prompt_tokens: int
    num_completion_tokens: int


class _Request(Struct, frozen=True):
    model: str
    messages: list[Message]
    tools: list[Mapping[str, Any]] | UnsetType = UNSET
    max_tokens: int | UnsetType = UNSET
    max_completion_tokens: int | UnsetType = UNSET
    temperature: float | UnsetType = UNSET
    top_p: float | UnsetType = UNSET


class _Function(Struct, frozen=True):
    name: str
    arguments: str = "{}"


class _ToolCall(Struct, frozen=True):
    function: _Function
    id: str = ""


class _Message(Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(Struct, frozen=True):
    message: _Message
    finish_reason: str | None = None


class _Usage(Struct, frozen=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Reply(Struct, frozen=True):
    choices: Annotated[list[_Choice], Meta(min_length=1)]
    usage: _Usage | None = None


class _Fault(Struct, frozen=True):
    param: str | None = None


class _Refusal(Struct, frozen=True):
    error: _Fault


_replies = msgspec.json.Decoder(_Reply)
_refusals = msgspec.json.Decoder(_Refusal)


class ChatClient:
    """One model at one endpoint. `url` is its base: `https://host/v1`; a bare host means `/v1`."""

    def __init__(self, url: str, model: str, key: str = "", *, deadline_s: float = 120.0) -> None:
        host, _, path = url.partition("://")[2].partition("/")
        is_bare = host and not path.strip("/")
        self.url = f"{url.rstrip('/')}/v1" if is_bare else url.rstrip("/")
        self.model = model
        self._deadline_s = deadline_s
        self._unknown: set[str] = set()
        try:
            self._http = HttpClient(self.url, headers(key))
        except HttpError as error:
            raise EngineError(str(error)) from None

    async def check(self) -> None:
        """Raise EngineError unless the endpoint answers and, if it lists its models, has this one. A
        list in a shape of its own is as good as none."""
        try:
            async with asyncio.timeout(min(CHECK_DEADLINE_S, self._deadline_s)):
                models = await served_models(self._http, "/models")
        except UNREADABLE:
            return
        except (HttpError, TimeoutError) as error:
            raise EngineError(f"no endpoint at {self.url}: {error or 'it does not answer'}") from None
        if models is not None:
            self.model = pick(models, self.model, self.url).id

    async def complete(
        self, messages: Sequence[Message], sampling: Sampling, tools: Sequence[Mapping[str, Any]] = ()
    ) -> ChatReply:
        """Draw one reply. An endpoint that says "later" is asked again until the deadline; EngineError
        says why there is no reply."""
        said = ""
        try:
            async with asyncio.timeout(self._deadline_s) as deadline:
                num_refused = 0
                while True:
                    request = self._request(messages, sampling, tools)
                    head, body = await self._post(msgspec.json.encode(request))
                    if head.status == 200:
                        return self._drawn(body)
                    said = problem(head.status, body)
                    if self._learns(head.status, body, request):
                        continue
                    if head.status not in LATER:
                        raise self._error(said)
                    num_refused += 1
                    await self._pause(head, num_refused, said, deadline.when())
        except TimeoutError:
            last = f"; last it said {said}" if said else ""
            raise self._error(f"no reply within {self._deadline_s:g} s{last}") from None
        except HttpError as error:
            raise self._error(str(error)) from None

    async def _post(self, body: bytes) -> tuple[ReplyHead, bytearray]:
        async with self._http.request("POST", PATH, body) as reply:
            return reply.head, await read_all(reply)

    def _request(
        self, messages: Sequence[Message], sampling: Sampling, tools: Sequence[Mapping[str, Any]]
    ) -> _Request:
        """All of the sampling is sent, so that no default of the model's applies, but for what this
        endpoint is known not to take."""
        unknown = self._unknown
        is_old = "max_tokens" not in unknown
        return _Request(
            model=self.model,
            messages=list(messages),
            tools=list(tools) or UNSET,
            max_tokens=sampling.max_tokens if is_old else UNSET,
            max_completion_tokens=UNSET if is_old else sampling.max_tokens,
            temperature=UNSET if "temperature" in unknown else sampling.temperature,
            top_p=UNSET if "top_p" in unknown else sampling.top_p,
        )

    def _learns(self, status: int, body: bytearray, request: _Request) -> bool:
        """Whether the endpoint names a parameter that it does not take, and that can be left out or
        said otherwise: the request is then worth another try."""
        if status != 400:
            return False
        try:
            name = _refusals.decode(body).error.param or ""
        except UNREADABLE:
            return False
        sent = getattr(request, name, UNSET) if name in ("max_tokens", *BY_DEFAULT) else UNSET
        if sent is UNSET or sent != BY_DEFAULT.get(name, sent):
            return False
        self._unknown.add(name)
        return True

    async def _pause(self, head: ReplyHead, num_refused: int, said: str, until_s: float | None) -> None:
        asked_s = retry_after_s(head.headers, datetime.now(UTC))
        pause_s = back_off_s(num_refused, random.random()) if asked_s is None else asked_s
        if until_s is not None and asyncio.get_running_loop().time() + pause_s >= until_s:
            raise self._error(f"{said}; asking again in {pause_s:.1f} s would pass the deadline of "
                              f"{self._deadline_s:g} s")  # fmt: skip
        await asyncio.sleep(pause_s)

    def _drawn(self, body: bytearray) -> ChatReply:
        try:
            reply = _replies.decode(body)
        except UNREADABLE as error:
            raise self._error(f"not a chat completion ({error}): {problem(200, body)}") from None
        choice, usage = reply.choices[0], reply.usage or _Usage()
        message = choice.message
        calls = message.tool_calls or []
        return ChatReply(
            content=message.content or "",
            reasoning_content=message.reasoning_content or message.reasoning,
            tool_calls=tuple(_as_call(one) for one in calls),
            finish_reason=choice.finish_reason or "stop",
            num_prompt_tokens=usage.prompt_tokens or 0,
            num_completion_tokens=usage.completion_tokens or 0,
        )

    def _error(self, what: str) -> EngineError:
        return EngineError(f"{self.url}{PATH}: {what}")

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> "ChatClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _as_call(call: _ToolCall) -> ToolCall:
    return ToolCall(call.id, CalledFunction(call.function.name, call.function.arguments))
