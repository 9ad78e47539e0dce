"""Examines an engine: asks it what training would ask it, and says what is right and what is not."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import msgspec
import numpy as np
from msgspec import Struct

from ...errors import EngineError
from ...model.shape import ModelShape
from ...records.probe import Probe
from ...records.turn import Sampling, Turn
from ...vllm.binary_reply import SAFETENSORS
from ..engines.control import OURS, EngineControl, open_api, open_control
from ..engines.dialect import EngineCall, make_prompt
from ..engines.engine import ACCEPT, Engine, open_engine
from ..engines.facts import EXTENSION, MIDDLEWARE, SAMPLED_LOGPROBS, EngineFacts, problems
from ..engines.link import EngineAccess, open_link
from ..engines.status import is_at_least
from ..engines.verdict import CEILINGS, COARSEST, FLOORS, Tolerance, compare, why_refused
from ..engines.vllm import Vllm
from ..http.client import HttpReply
from ..replies.checks import ReplyRules
from .finding import Finding, note, ok, wrong

PROMPT = np.arange(10, 60, dtype=np.int32)
"""Token ids that every model has."""
COLD = 0.05
"""A temperature at which the most likely token has nearly all of the probability."""
SURE = 0.2
"""A mean logprob nearer to 0 than this does not show at which temperature it was computed."""
NUM_DRAWN = 8
TOOL = {"name": "add", "parameters": {"type": "object", "properties": {}}}


class Patient(Struct, frozen=True):
    """An engine under examination, and what is known of the model that it should serve."""

    access: EngineAccess
    control: EngineControl
    engine: Engine
    facts: EngineFacts | None
    shape: ModelShape | None
    probe: Probe | None
    """What the weights of `--model` say of a few texts. None without that option."""

    @property
    def wants_routes(self) -> bool:
        return self.shape is not None and self.shape.has_experts

    @property
    def is_vllm(self) -> bool:
        return self.control.served.owned_by == "vllm"

    async def draw(self, temperature: float = 1.0, start: int = 0) -> Turn:
        return await self.engine.complete(
            make_prompt(PROMPT), Sampling(NUM_DRAWN, temperature), [], start
        )


Check = Callable[[Patient], Awaitable[Finding | None]]


async def examine(
    access: EngineAccess, shape: ModelShape | None, probe: Probe | None, *, intrusive: bool
) -> AsyncIterator[Finding]:
    """Yield findings as they come. Unless `intrusive`, nothing changes on the server."""
    async with AsyncExitStack() as stack:
        control = await stack.enter_async_context(open_control(access, shape))
        has_experts = shape is not None and shape.has_experts
        rules = ReplyRules(wants_routes=has_experts, shape=shape)
        engine = await stack.enter_async_context(open_engine(access, rules))
        facts = await control.read_facts()
        patient = Patient(access, control, engine, facts, shape, probe)
        checks: list[Check] = [
            served, settings, tokens, logprobs_mode, routes, window, weights, reloads,
            prefix_cache, chat_with_tools, binary_replies, adapters,
        ]  # fmt: skip
        for check in checks + [pause, reload] * intrusive:
            try:
                finding = await check(patient)
            except (EngineError, ValueError) as error:
                finding = wrong(check.__name__.replace("_", " "), str(error))
            if finding is not None:
                yield finding


async def served(patient: Patient) -> Finding:
    model = patient.control.served
    kind = {"vllm": "vLLM", "sglang": "SGLang", OURS: "rollway's embedded engine"}
    name = kind.get(model.owned_by or "", "an unknown engine")
    facts = patient.facts
    numbers = f", computes in {facts.dtype}" if facts and facts.dtype else ""
    return ok(
        "engine", f"{name} serves '{model.id}' ({model.root or 'no path given'}){numbers}"
    )


async def settings(patient: Patient) -> Finding:
    found = problems(
        patient.control.served,
        patient.facts,
        wants_routes=patient.wants_routes,
        temperature=1.0,
    )
    if texts := list(found):
        return wrong("settings", "; ".join(texts))
    return ok(
        "settings", "nothing that the engine tells about itself is in the way of training"
    )


async def tokens(patient: Patient) -> Finding:
    turn = await patient.draw()
    return ok(
        "tokens", f"token ids in, {len(turn.completion_ids)} token ids and logprobs out"
    )


async def logprobs_mode(patient: Patient) -> Finding:
    """Draw at a low temperature. There the logprob of a drawn token is nearly 0 if it is that of the
    distribution that was drawn from, and nearly the same as at temperature 1 if it is not."""
    turn = await patient.draw(COLD)
    ids = [*PROMPT.tolist(), *turn.completion_ids.tolist()]
    (answer,) = await patient.control.probe([ids])
    plain, subject = np.array(answer.logprobs[len(PROMPT) - 1 :]), "logprobs"
    told = patient.facts.logprobs_mode if patient.facts else SAMPLED_LOGPROBS
    if told == SAMPLED_LOGPROBS and plain.mean() > -SURE:
        return note(subject, "the model is too sure of its tokens to tell their mode")
    if told == SAMPLED_LOGPROBS and turn.logprobs.mean() > plain.mean() / 2:
        return ok(
            subject, "they are those of the distribution drawn from, at any temperature"
        )
    return wrong(
        subject,
        "they ignore the temperature, so training is right at temperature 1 only: start vLLM with "
        "--logprobs-mode processed_logprobs",
    )


async def routes(patient: Patient) -> Finding:
    if not patient.wants_routes:
        reason = (
            "the model has no experts" if patient.shape else "not examined without --model"
        )
        return note("routes", reason)
    half = len(PROMPT) // 2
    whole, new = await patient.draw(), await patient.draw(start=half)
    assert whole.routes is not None
    assert new.routes is not None
    if not whole.routes.any():
        return wrong("routes", "all are expert 0: start vLLM with --enforce-eager on a CPU")
    if not np.array_equal(whole.routes[half : len(PROMPT)], new.routes[: len(PROMPT) - half]):
        return wrong("routes", "those of new positions differ from those of all positions")
    shape = "×".join(map(str, whole.routes.shape[1:]))
    return ok("routes", f"{shape} experts a token, of all positions or of new ones only")


async def window(patient: Patient) -> Finding:
    tokens, model = patient.control.served.max_model_len, patient.shape
    if not tokens:
        return note("context", "the engine does not tell its window: set engine.max_context")
    most = model.max_context if model else None
    if most and tokens > most:
        text = f"{tokens} tokens, but the positions of the model are made for {most}"
        return wrong("context", f"{text}: start vLLM with --max-model-len {most}")
    return ok("context", f"{tokens} tokens of prompt and reply together")


async def weights(patient: Patient) -> Finding | None:
    """Compare the engine with the weights of `--model`."""
    probe = patient.probe
    if probe is None:
        return note("weights", "not compared without --model")
    answers = await patient.control.probe([text.token_ids for text in probe.texts])
    told = patient.facts.dtype if patient.facts else ""
    dtype = told if told in CEILINGS else COARSEST
    if patient.control.served.owned_by == OURS:
        dtype = probe.dtype
    tolerance = Tolerance(max(probe.dtype, dtype, key=CEILINGS.__getitem__))
    comparison = compare(probe, answers, tolerance)
    if why := why_refused(comparison, 0, tolerance):
        return wrong("weights", f"{comparison}: {why}")
    return ok("weights", str(comparison))


async def reloads(patient: Patient) -> Finding | None:
    facts, model = patient.facts, patient.shape
    if not patient.is_vllm or facts is None:
        return None
    if facts.has_plugin:
        return ok("new weights", "rollway's plug-in loads them exactly")
    remedy = f"start vLLM with --worker-extension-cls {EXTENSION}"
    if facts.is_on_cpu and model is not None and model.has_experts:
        return wrong("new weights", f"vLLM's own reload breaks experts on a CPU: {remedy}")
    if model is not None and model.has_tied_head:
        text = "vLLM's own reload leaves the output layer old, because it is tied to the embeddings"
        return wrong("new weights", f"{text}: {remedy}")
    return note(
        "new weights", f"vLLM's own reload is used; to be sure that it is exact, {remedy}"
    )


async def prefix_cache(patient: Patient) -> Finding | None:
    if patient.facts is None:
        return None
    return ok("prefix cache", "on" if patient.facts.caches_prefixes else "off")


async def chat_with_tools(patient: Patient) -> Finding:
    request = {
        "model": patient.control.served.id,
        "messages": [{"role": "user", "content": "1 + 1"}],
        "tools": [{"type": "function", "function": TOOL}],
        "max_tokens": 1,
    }
    call = EngineCall("/v1/chat/completions", msgspec.json.encode(request))
    async with open_api(patient.access) as api:
        try:
            await api.fetch("POST", call)
        except EngineError as error:
            return note("chat with tools", f"only evaluations over chat need it: {error}")
    return ok("chat with tools", "answered")


async def binary_replies(patient: Patient) -> Finding | None:
    if not patient.is_vllm:
        return None
    dialect, model = Vllm(), patient.control.served.id
    body = dialect.encode_request(model, make_prompt(PROMPT), Sampling(1), [], 0)

    async def read_kind(reply: HttpReply) -> str | None:
        await reply.read_all()
        return reply.head.headers.get("content-type")

    with open_link(patient.access) as link:
        kind = await link.post(dialect.path, body, ACCEPT, read_kind)
    if kind == SAFETENSORS:
        return ok("binary replies", "columns and routes come as raw bytes")
    text = "routes come as base64 inside JSON, a third more bytes"
    remedy = (
        f"start vLLM with --middleware {MIDDLEWARE}; if it was, its log says what is wrong"
    )
    return note("binary replies", f"{text}: {remedy}")


async def adapters(patient: Patient) -> Finding | None:
    if patient.facts is None:
        return None
    return ok("LoRA", "on" if patient.facts.takes_adapters else "off (--enable-lora)")


async def pause(patient: Patient) -> Finding:
    await patient.control.pause_and_resume()
    await patient.draw()
    return ok("pause", "the engine pauses, continues, and answers as before")


async def reload(patient: Patient) -> Finding:
    """Load the weights that the engine has once more. It must say the same of a text as before."""
    control, folder = patient.control, patient.control.served.root
    if not folder:
        return note("reload", "not tried: the engine does not tell which folder it serves")
    if is_at_least(label := await control.weight_version(), 1):
        return note("reload", f"not tried: the engine has version {label} of a run")
    texts = [PROMPT.tolist()]
    (before,) = await control.probe(texts)
    try:
        await control.load_weights(folder, 0)
    except EngineError as refusal:
        text = "the engine is paused now, and its weights may be damaged: start it again"
        return wrong("reload", f"{refusal}; {text}")
    await control.confirm(0)
    (after,) = await control.probe(texts)
    error = float(np.abs(np.subtract(after.logprobs, before.logprobs)).max())
    told = patient.facts.dtype if patient.facts else COARSEST
    if not error <= FLOORS.get(told, FLOORS[COARSEST]):
        return wrong(
            "reload",
            f"after a load of the same weights logprobs differ by {error:.2g}: start vLLM with "
            f"--worker-extension-cls {EXTENSION}, and start it again now",
        )
    return ok("reload", f"the same weights give the same logprobs, to {error:.1g}")
