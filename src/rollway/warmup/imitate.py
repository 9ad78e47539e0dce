"""The warm-up: a tiny model learns to imitate an environment's answers, but only a little.

Reinforcement needs something to reinforce; this stops as soon as a right answer is likely enough.
"""

import itertools
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from ..config.specs import WarmupSpec
from ..envs.in_lane import EnvSpec
from ..errors import ConfigError, ModelError, RollwayError
from ..inference.rendering.rendering import SyncRenderer
from ..inference.rendering.tokenizer import Tokenizer
from ..model.load import save_weights
from ..model.tiny import TinyShape, tiny_model, write_tokenizer
from ..records.task import Message
from ..wire.pipe import BlockingPipe
from .recipe import RECIPE, WarmupEnded, WarmupProgress, recipe

REPORT_EVERY = 10
RAMP_STEPS = 20
SEED_OFFSET = 1_000_003
"""Warm-up tasks are not the ones the run trains on."""


def warm_up(part: WarmupSpec, pipe: BlockingPipe) -> None:
    """Build the model in a folder beside `model.path`, and give it that name when it is done."""
    target = Path(part.model.path)
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        vocab_size = write_tokenizer(partial)
        torch.manual_seed(part.seed)
        eos_id = Tokenizer(str(partial)).convert_tokens_to_ids("<|im_end|>")
        model = tiny_model(TinyShape(), vocab_size, eos_id, part.max_context)
        _imitate(model, _examples(part, str(partial)), part, pipe)
        save_weights(model, partial)
        (partial / RECIPE).write_bytes(recipe(part))
        os.replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _examples(part: WarmupSpec, folder: str) -> Iterator[tuple[list[int], list[int]]]:
    """Prompt ids and answer ids of the environment's tasks, for ever."""
    rendering = SyncRenderer(msgspec.structs.replace(part.model, path=folder))
    tokenizer = Tokenizer(folder)
    args = msgspec.json.encode(part.env.args)
    for epoch in itertools.count():
        env = EnvSpec(part.env.id, args, part.seed + SEED_OFFSET + epoch).build()
        system = [Message("system", env.system_prompt)] if env.system_prompt else []
        tasks = iter(env.tasks())
        first = next(tasks, None)
        if first is None:
            raise ConfigError(f"warm-up needs tasks; '{part.env.id}' has none")
        for task in itertools.chain([first], tasks):
            if not isinstance(task.answer, str):
                raise ConfigError(f"warm-up needs tasks with a text answer; '{part.env.id}' has none")
            prompt = rendering.prompt([*system, Message("user", task.prompt)])
            yield prompt, [*tokenizer.encode(task.answer), rendering.stop_ids[0]]


def _imitate(
    model: Any, examples: Iterator[tuple[list[int], list[int]]], part: WarmupSpec,
    pipe: BlockingPipe,
) -> None:  # fmt: skip
    """Supervised steps until the mean probability of a whole answer reaches the solve rate."""
    wants = part.warmup
    optimizer = torch.optim.AdamW(model.parameters(), lr=wants.lr, betas=(0.9, 0.95))
    model.train()
    recent = 0.0
    for step in range(1, wants.max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = wants.lr * min(1.0, step / RAMP_STEPS)
        loss, solved = _likelihood(model, list(itertools.islice(examples, wants.batch_size)))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recent = 0.7 * recent + 0.3 * solved
        done = recent >= wants.solve_rate
        if done or step % REPORT_EVERY == 0:
            pipe.send(msgspec.msgpack.encode(WarmupProgress(step, loss.item(), recent)))
        if done:
            return
    raise ModelError(
        f"warm-up reached a solve rate of {recent:.3f} in {wants.max_steps} steps, not "
        f"{wants.solve_rate}; raise warmup.max_steps or warmup.lr"
    )


def _likelihood(model: Any, examples: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, float]:
    """Mean loss of an answer's token, and mean probability of a whole answer."""
    width = max(len(prompt) + len(answer) for prompt, answer in examples)
    ids = torch.zeros(len(examples), width, dtype=torch.long)
    mask = torch.zeros(len(examples), width, dtype=torch.bool)
    for index, (prompt, answer) in enumerate(examples):
        end = len(prompt) + len(answer)
        ids[index, :end] = torch.tensor(prompt + answer)
        mask[index, len(prompt) : end] = True
    logprobs = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[:, :-1].float(), -1)
    answers = logprobs.gather(-1, ids[:, 1:, None])[..., 0] * mask[:, 1:]
    return -answers.sum() / mask.sum(), float(answers.detach().sum(-1).exp().mean())


def main(name: str, sock: socket.socket) -> None:
    """The warm-up's process."""
    pipe = BlockingPipe(sock)
    first = pipe.receive()
    if first is None:
        return
    try:
        warm_up(msgspec.msgpack.decode(first, type=WarmupSpec), pipe)
        ended = WarmupEnded()
    except RollwayError as error:
        ended = WarmupEnded(str(error))
    pipe.send(msgspec.msgpack.encode(ended))
