"""The warm-up: teaches a tiny model to imitate an environment's answers, but only a little.

Reinforcement learning needs right answers to reinforce. The warm-up stops as soon as the model gives
them often enough.
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
from msgspec import msgpack

from ..config.sections import WarmupConfig
from ..config.specs import WarmupSpec
from ..envs.in_lane import EnvSpec
from ..errors import ConfigError, ModelError, RollwayError
from ..inference.rendering.rendering import SyncRenderer
from ..inference.rendering.tokenizer import Tokenizer
from ..loop.processes.child import receive_spec
from ..model.load import save_weights
from ..model.tiny import TinyShape, tiny_model, write_tokenizer
from ..records.task import Message
from ..wire.pipe import BlockingPipe
from .recipe import RECIPE, WarmupEnded, WarmupProgress, recipe

Example = tuple[list[int], list[int]]
"""The ids of a prompt and the ids of its answer."""

REPORT_EVERY = 10
RAMP_STEPS = 20
SEED_OFFSET = 1_000_003
"""Added to the seed, so that the warm-up does not see the tasks that the run trains on."""


def warm_up(spec: WarmupSpec, pipe: BlockingPipe) -> None:
    """Build the model in a folder beside `model.path`, and rename the folder when the model is done."""
    target = Path(spec.model.path)
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        vocab_size = write_tokenizer(partial)
        torch.manual_seed(spec.seed)
        eos_id = Tokenizer(str(partial)).convert_tokens_to_ids("<|im_end|>")
        shape = TinyShape(num_experts=spec.warmup.experts)
        model = tiny_model(shape, vocab_size, eos_id, spec.max_context)
        _imitate(model, _examples(spec, str(partial)), spec.warmup, pipe)
        save_weights(model, partial)
        (partial / RECIPE).write_bytes(recipe(spec))
        os.replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _examples(spec: WarmupSpec, folder: str) -> Iterator[Example]:
    """Yield the environment's tasks forever, in another order in each epoch."""
    renderer = SyncRenderer(msgspec.structs.replace(spec.model, path=folder))
    tokenizer = Tokenizer(folder)
    args = msgspec.json.encode(spec.env.args)
    for epoch in itertools.count():
        env = EnvSpec(spec.env.id, args, spec.seed + SEED_OFFSET + epoch).build()
        system = [Message("system", env.system_prompt)] if env.system_prompt else []
        has_tasks = False
        for task in env.tasks():
            has_tasks = True
            if not isinstance(task.answer, str):
                kind = type(task.answer).__name__
                raise ConfigError(
                    f"the warm-up needs tasks with a text answer, but the answer of task '{task.id}' of "
                    f"'{spec.env.id}' is {kind}; remove [warmup] to use a model folder"
                )
            prompt = renderer.prompt([*system, Message("user", task.prompt)])
            yield prompt, [*tokenizer.encode(task.answer), renderer.stop_ids[0]]
        if not has_tasks:
            raise ConfigError(f"the warm-up needs tasks, but '{spec.env.id}' has none")


def _imitate(
    model: Any, examples: Iterator[Example], config: WarmupConfig, pipe: BlockingPipe
) -> None:
    """Take supervised steps until the mean probability of a whole answer reaches the solve rate."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95))
    model.train()
    solve_rate = 0.0
    for step in range(1, config.max_steps + 1):
        for param_group in optimizer.param_groups:
            param_group["lr"] = config.lr * min(1.0, step / RAMP_STEPS)
        batch = list(itertools.islice(examples, config.batch_size))
        loss, probability = _likelihood(model, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        solve_rate = 0.7 * solve_rate + 0.3 * probability
        is_done = solve_rate >= config.solve_rate
        if is_done or step % REPORT_EVERY == 0:
            pipe.send(msgpack.encode(WarmupProgress(step, loss.item(), solve_rate)))
        if is_done:
            return
    raise ModelError(
        f"the warm-up reached a solve rate of {solve_rate:.3f} in {config.max_steps} steps, not "
        f"{config.solve_rate}; raise warmup.max_steps or warmup.lr"
    )


def _likelihood(model: Any, examples: list[Example]) -> tuple[torch.Tensor, float]:
    """Return the mean loss of an answer's tokens, and the mean probability of a whole answer."""
    width = max(len(prompt) + len(answer) for prompt, answer in examples)
    ids = torch.zeros(len(examples), width, dtype=torch.long)
    mask = torch.zeros(len(examples), width, dtype=torch.bool)
    for index, (prompt, answer) in enumerate(examples):
        end = len(prompt) + len(answer)
        ids[index, :end] = torch.tensor(prompt + answer)
        mask[index, len(prompt) : end] = True
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    logprobs = torch.log_softmax(logits.float(), -1)
    answers = logprobs.gather(-1, ids[:, 1:, None])[..., 0] * mask[:, 1:]
    return -answers.sum() / mask.sum(), float(answers.detach().sum(-1).exp().mean())


def main(name: str, sock: socket.socket) -> None:
    """Run the warm-up in its process."""
    pipe, spec = receive_spec(sock, WarmupSpec)
    try:
        warm_up(spec, pipe)
        ended = WarmupEnded()
    except RollwayError as error:
        ended = WarmupEnded(str(error))
    pipe.send(msgpack.encode(ended))
