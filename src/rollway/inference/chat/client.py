"""A client of OpenAI-compatible chat endpoints, which take and return messages but no token ids."""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from ...config.credentials import without_credentials
from ...errors import UNREADABLE, ContextFull, EngineError
from ...records.task import CalledFunction, Message, ToolCall
from ...records.turn import Sampling
from ..http import endpoint
from ..http.api_client import ApiClient
from ..http.framing import HttpAway, HttpError, ReplyHead

PATH = "/chat/completions"
CHECK_DEADLINE_S = 30.0
LOOK_EVERY_S = 2.0
MAX_AWAY = 3
"""How often an endpoint that cannot be reached is asked again, within a few seconds."""
ABORTED = "abort"
SHORT = 16
"""Tokens of a reply that is not looked at. Some endpoints refuse fewer."""
REFUSED_PARAM_STATUSES = (400, 422)
ToolSpecs = Sequence[Mapping[str, Any]]
DEFAULTS = {"temperature": 1.0, "top_p": 1.0}
"""The values that endpoints use for missing parameters, so that these values may be left out."""
NEUTRAL = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Parameters that servers of open models take from the model's folder if they are missing. These values
switch them off. An endpoint that does not know them refuses them, and gets none then."""
IDS = {"logprobs": True, "return_token_ids": True}
"""What asks for the token ids of a reply. An endpoint that does not know these ignores
or refuses them."""


class ChatTokens(Struct, frozen=True):
    """The token ids of a reply and of its prompt, and the logprobs of the reply's tokens."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]


class ChatReply(Struct, frozen=True):
    """The reply of a chat endpoint. The numbers of tokens are 0 if the endpoint does not count them."""

    content: str
    reasoning_content: str | None
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    num_prompt_tokens: int
    num_completion_tokens: int
    tokens: ChatTokens | None = None
    """None if the endpoint returns no token ids, or no logprobs for them."""

    @property
    def message(self) -> Message:
        return Message("assistant", self.content, self.reasoning_content, self.tool_calls)


class _Request(Struct, frozen=True):
    model: str
    messages: list[Message]
    tools: list[Mapping[str, Any]] | UnsetType = UNSET
    max_tokens: int | UnsetType = UNSET
    max_completion_tokens: int | UnsetType = UNSET
    temperature: float | UnsetType = UNSET
    top_p: float | UnsetType = UNSET
    top_k: int | UnsetType = UNSET
    min_p: float | UnsetType = UNSET
    repetition_penalty: float | UnsetType = UNSET
    logprobs: bool | UnsetType = UNSET
    return_token_ids: bool | UnsetType = UNSET


class _Function(Struct, frozen=True):
    name: str
    arguments: str = "{}"


class _ToolCall(Struct, frozen=True):
    function: _Function
    id: str = ""

    def record(self) -> ToolCall:
        function = self.function
        return ToolCall(self.id, CalledFunction(function.name, function.arguments))


class _Message(Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Logprob(Struct, frozen=True):
    logprob: float


class _Logprobs(Struct, frozen=True):
    content: list[_Logprob] | None = None


class _Choice(Struct, frozen=True):
    message: _Message
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _Usage(Struct, frozen=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Reply(Struct, frozen=True):
    choices: Annotated[list[_Choice], Meta(min_length=1)]
    usage: _Usage | None = None
    prompt_token_ids: list[int] | None = None

    @property
    def tokens(self) -> ChatTokens | None:
        choice = self.choices[0]
        found = choice.logprobs and choice.logprobs.content
        if not self.prompt_token_ids or not choice.token_ids or not found:
            return None
        if len(found) != len(choice.token_ids):
            return None
        logprobs = [token.logprob for token in found]
        return ChatTokens(self.prompt_token_ids, choice.token_ids, logprobs)


_replies = msgspec.json.Decoder(_Reply)


class ChatClient:
    """One model at one endpoint. `url` is the base, such as `https://host/v1`. `/v1` may be left out."""

    def __init__(
        self, url: str, model: str, key: str = "", *, deadline_s: float = 120.0
    ) -> None:
        url = without_credentials(url)
        host, _, path = url.partition("://")[2].partition("/")
        self.url = url.rstrip("/")
        if host and not path.strip("/"):
            self.url += "/v1"
        self.model = model
        self._deadline_s = deadline_s
        self._optional: dict[str, Any] = dict(NEUTRAL)
        """Parameters that the endpoint need not know."""
        self._refused: set[str] = set()
        self.max_context = 0
        """The endpoint's context window, or 0 as long as it is not known."""
        try:
            headers = endpoint.request_headers(key, self.url)
            self._http = ApiClient(self.url, headers, proxied=True)
        except HttpError as error:
            raise EngineError(str(error)) from None

    async def check(self, patience_s: float = 0.0) -> None:
        """Raise EngineError unless the endpoint answers and, if it lists its models, has this one. A
        list that cannot be parsed is ignored. `patience_s` is how long to wait for an answer."""
        until_s = time.monotonic() + patience_s
        try:
            async with asyncio.timeout(min(CHECK_DEADLINE_S, self._deadline_s)):
                models = await endpoint.fetch_models(self._http, "/models")
        except UNREADABLE:
            return
        except (HttpError, TimeoutError) as error:
            if time.monotonic() < until_s:
                await asyncio.sleep(LOOK_EVERY_S)
                return await self.check(until_s - time.monotonic())
            reason = str(error) or "it did not answer in time"
            raise EngineError(f"no endpoint at {self.url}: {reason}") from None
        if models is not None:
            served = endpoint.pick_model(models, self.model, self.url)
            self.model, self.max_context = served.id, served.max_model_len or 0

    async def ask_for_ids(self, messages: Sequence[Message], prompt_ids: list[int]) -> None:
        """Ask for the token ids of all further replies, if the endpoint has the same ids for these
        messages as the trained model."""
        self._optional |= IDS
        tokens = (await self.complete(messages, Sampling(SHORT))).tokens
        if tokens is None or tokens.prompt_ids != prompt_ids:
            self._optional = dict(NEUTRAL)

    async def complete(
        self, messages: Sequence[Message], sampling: Sampling, tools: ToolSpecs = ()
    ) -> ChatReply:
        """Draw one reply, or raise EngineError. Raise ContextFull if the messages leave no room for a
        reply. If the room is smaller than `max_tokens`, the reply gets all of it."""
        try:
            return await self._draw(messages, sampling, tools)
        except ContextFull:
            if sampling.max_tokens == 1:
                raise
        # only the endpoint can count the tokens of the messages, and a short reply makes it do so
        short = await self._draw(messages, replace(sampling, max_tokens=1), tools)
        room = self.max_context - short.num_prompt_tokens
        if not short.num_prompt_tokens or room <= 1:
            return short
        return await self._draw(messages, replace(sampling, max_tokens=room), tools)

    async def _draw(
        self, messages: Sequence[Message], sampling: Sampling, tools: ToolSpecs
    ) -> ChatReply:
        """Draw a reply. An endpoint that is busy or away, or that aborts its reply, is asked again until
        the deadline."""
        refusal = ""
        try:
            async with asyncio.timeout(self._deadline_s) as deadline:
                num_refused = num_away = 0
                while True:
                    request, headers = self._request(messages, sampling, tools), {}
                    try:
                        encoded = msgspec.json.encode(request)
                        head, body = await self._http.fetch("POST", PATH, encoded)
                    except HttpAway as error:
                        num_away += 1
                        if num_away > MAX_AWAY:
                            raise
                        refusal = str(error)
                    else:
                        reply, refusal = self._take(head, body, request)
                        if reply is not None:
                            return reply
                        headers = head.headers
                    if refusal:
                        num_refused += 1
                        await self._pause(headers, num_refused, refusal, deadline.when())
        except TimeoutError:
            last = f"; its last answer was {refusal}" if refusal else ""
            raise self._error(f"no reply within {self._deadline_s:g} s{last}") from None
        except HttpError as error:
            raise self._error(str(error)) from None

    def _take(
        self, head: ReplyHead, body: bytearray, request: _Request
    ) -> tuple[ChatReply | None, str]:
        """Return a reply, or why the endpoint must be asked again later. The reason is empty if another
        request may be sent at once."""
        if head.status == 200:
            reply = self._parse_reply(body)
            if reply.finish_reason != ABORTED:
                return reply, ""
            return None, "the reply was aborted"
        refusal = endpoint.describe_error(head.status, body)
        if self._learn_param(head.status, body, request):
            return None, ""
        self._check_context(head.status, body, refusal)
        if head.status not in endpoint.RETRY_STATUSES:
            raise self._error(refusal)
        return None, refusal

    def _request(
        self, messages: Sequence[Message], sampling: Sampling, tools: ToolSpecs
    ) -> _Request:
        """Build a request with all sampling parameters, so that no default of the model applies. Those
        that this endpoint refused before are left out."""
        params = {name: getattr(sampling, name) for name in ("max_tokens", *DEFAULTS)}
        params |= self._optional
        for name in self._refused:
            value = params.pop(name, None)
            if name == "max_tokens":
                params["max_completion_tokens"] = value
        return _Request(self.model, list(messages), list(tools) or UNSET, **params)

    def _learn_param(self, status: int, body: bytearray, request: _Request) -> bool:
        """Note a parameter that the endpoint refuses, if the request means the same without it, and
        return whether another try is worth it. `max_tokens` has a newer name, and a parameter that has
        its default value can be left out."""
        error = endpoint.parse_error(body)
        if status not in REFUSED_PARAM_STATUSES or endpoint.is_context_error(status, error):
            return False
        names = ("max_tokens", *DEFAULTS, *self._optional)
        sent = {name: getattr(request, name) for name in names}
        text = f"{error.param} {error.message}"
        unknown = {name for name in self._optional if name in text}
        refused = {
            name for name in (*unknown, error.param) if sent.get(name, UNSET) is not UNSET
        }
        if any(sent[name] != DEFAULTS.get(name, sent[name]) for name in refused):
            return False
        self._refused |= refused
        return bool(refused)

    def _check_context(self, status: int, body: bytearray, refusal: str) -> None:
        error = endpoint.parse_error(body)
        if endpoint.is_context_error(status, error):
            self.max_context = self.max_context or endpoint.window_in(error)
            raise ContextFull(f"{self.url}{PATH}: {refusal}", status=status)

    async def _pause(
        self,
        headers: Mapping[str, str],
        num_refused: int,
        refusal: str,
        until_s: float | None,
    ) -> None:
        """Wait before the next try, as long as the endpoint asks for. Raise if that is too long."""
        pause_s = endpoint.retry_after_s(headers, datetime.now(UTC))
        if pause_s is None:
            pause_s = endpoint.back_off_s(num_refused, random.random())
        now_s = asyncio.get_running_loop().time()
        if until_s is not None and now_s + pause_s >= until_s:
            deadline = f"the deadline of {self._deadline_s:g} s"
            raise self._error(
                f"{refusal}; asking again in {pause_s:.1f} s would pass {deadline}"
            )
        await asyncio.sleep(pause_s)

    def _parse_reply(self, body: bytearray) -> ChatReply:
        try:
            reply = _replies.decode(body)
        except UNREADABLE as error:
            answer = endpoint.describe_error(200, body)
            raise self._error(f"this is not a chat completion ({error}): {answer}") from None
        choice, usage = reply.choices[0], reply.usage or _Usage()
        message = choice.message
        return ChatReply(
            content=message.content or "",
            reasoning_content=message.reasoning_content or message.reasoning,
            tool_calls=tuple(call.record() for call in message.tool_calls or []),
            finish_reason=choice.finish_reason or "stop",
            num_prompt_tokens=usage.prompt_tokens or 0,
            num_completion_tokens=usage.completion_tokens or 0,
            tokens=reply.tokens,
        )

    def _error(self, problem: str) -> EngineError:
        return EngineError(f"{self.url}{PATH}: {problem}")

    async def __aenter__(self) -> "ChatClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()
