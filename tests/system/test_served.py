"""An environment served from its run file behaves as one that the run serves itself."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiohttp import web
from tests.doubles.stand_ins import CopyingTrainer, DrawingEngine, background
from tests.doubles.workspace import DEADLINE_S, Workspace

from rollway.inference.rendering.tokenizer import Tokenizer

pytestmark = pytest.mark.system

ENV = """
import asyncio
import os

import rollway as rw


class Shop(rw.Environment):
    def __init__(self, price=0):
        self.price = price

    def tasks(self):
        yield from (rw.Task(id=str(n), prompt=f"{n}?") for n in range(200))

    async def rollout(self, task, chat):
        await chat.say(task.prompt)
        if int(task.id) % 4 == 3:
            await asyncio.sleep(1000)

    @rw.reward
    def length(self, task, rollout):
        return len(rollout.last_text) % 7 / 7 + self.price

"""
KEY = "sesame"
VOCAB_SIZE, RARE = 120_000, 110_000
UNLIKELY = -20.0


class GuardedEngine(DrawingEngine):
    """Draws only for those who have the key. Its answers to some prompts begin with gibberish."""

    async def _complete(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.json_response({"error": {"message": "wrong key"}}, status=401)
        reply = await super()._complete(request)
        prompt = (await request.json())["prompt"]
        if sum(prompt) % 3:
            return reply
        body = json.loads(reply.body)
        choice = body["choices"][0]
        choice["token_ids"][0] = RARE
        choice["logprobs"]["token_logprobs"][0] = UNLIKELY
        return web.json_response(body)


@pytest.fixture
def shop(
    tmp_path: Path, tiny_moe: Path, trainer: CopyingTrainer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Workspace]:
    """A run with an engine that demands a key, arguments, a short deadline, and a filter."""
    model = shutil.copytree(tiny_moe, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": VOCAB_SIZE}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOP_KEY", KEY)
    letters = Tokenizer(str(tiny_moe)).encode("abcdefghijkl")
    with background() as loop:
        engine = GuardedEngine(letters, loop)
        engine.open()
        work = Workspace(tmp_path, model, engines=[engine.url], trainer=trainer)
        (tmp_path / "shop.py").write_text(ENV)
        text = work.file.read_text()
        env = '[[env]]\nid = "shop.py"\nargs = { price = 2 }\n'
        env += "server = { workers = 1, concurrency = 16, rollout_deadline_s = 3.0 }\n"
        text = re.sub(r"\[\[env\]\].*?(?=\[sampling\])", env, text, flags=re.DOTALL)
        text = text.replace(
            " }\n            routes", ', key_var = "SHOP_KEY" }\n            routes'
        )
        text += '\n[payload]\nstore = "frames"\n[filters]\ngibberish = "enforce"\n'
        work.file.write_text(text)
        yield work
        work.kill()
        engine.kill()


@contextmanager
def server(work: Workspace, *args: str) -> Iterator[str]:
    """Serve the run file's environment, and yield its address."""
    command = [sys.executable, "-m", "rollway", "serve", str(work.file), *args]
    with subprocess.Popen(
        command, cwd=work.folder, env=work.env, text=True, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            found = (re.search(r"at (ipc://\S+/socket) ", line) for line in lines)
            address = next(filter(None, found), None)
            assert address is not None, "the server did not start"
            yield address[1]
        finally:
            process.terminate()
            process.wait(DEADLINE_S)


def saved(work: Workspace) -> list[dict[str, object]]:
    lines = [
        line
        for path in sorted(work.run.glob("rollouts/*/train.jsonl"))
        for line in path.read_text().splitlines()
    ]
    return [json.loads(line) for line in lines]


def check_run(work: Workspace, done: "subprocess.CompletedProcess[str]") -> None:
    """Arguments reached the rewards, the key the engine, the deadline and the filter the rollouts."""
    assert done.returncode == 0, done.stderr
    rollouts = saved(work)
    scored = [rollout for rollout in rollouts if rollout["outcome"] == "scored"]
    failed = [rollout for rollout in rollouts if rollout["outcome"] == "failed"]
    assert all(float(str(rollout["reward"])) >= 2 for rollout in scored)
    assert {int(str(rollout["task"])) % 4 for rollout in failed} == {3}
    assert {(rollout["boundary"], rollout["error"]) for rollout in failed} == {
        ("deadline", "the rollout ran longer than 3 s")
    }
    assert {rollout["env"] for rollout in rollouts} == {"shop"}, "one name everywhere"
    steps = work.metrics()
    assert any(step["filters/gibberish"] > 0 for step in steps)
    assert sum(step["filters/filtered"] for step in steps) > 0, "gibberish does not train"


def test_a_served_environment_behaves_as_a_local_one(shop: Workspace) -> None:
    check_run(shop, shop.train())
    with server(shop) as address:
        done = shop.train("--clean", "--set", f"env.0.external.address={address}")
        check_run(shop, done)
        assert not list((shop.run / "logs").glob("*router*")), "no server was started"
    logs = shop.folder / "outputs" / "serve" / "shop" / "logs"
    assert {path.name for path in logs.iterdir()} >= {"shop.router.log", "shop.w0.log"}


def test_what_a_run_and_its_server_disagree_on_is_refused_by_name(shop: Workspace) -> None:
    options = (
        "--seed", "7", "--args", '{"price": 3}', "--rollout-deadline-s", "4",
        "--renderer", "prime-qwen3", "--template", "{}", "--no-routes",
    )  # fmt: skip
    with server(shop, *options) as address:
        done = shop.train(
            "--set", f"env.0.external.address={address}",
            "--set", "engine.request_deadline_s=50",
            "--set", "env.0.external.shares_payload=true", "--set", "payload.store=files",
        )  # fmt: skip
    assert done.returncode == 1
    reason = done.stderr.splitlines()[0]
    assert reason.startswith(
        f"rollway: the server of 'shop' at {address} and the run disagree: "
    )
    for text in (
        "'seed' is 7 there and 0 in the run",
        """'env.args' is {"price":3} there and {"price":2} in the run""",
        "'env.server.rollout_deadline_s' is 4.0 there and 3.0 in the run",
        """'model.renderer' is "prime-qwen3" there and "qwen3" in the run""",
        """'model.template' is {} there and {"enable_thinking":false} in the run""",
        "'engine.request_deadline_s' is 120.0 there and 50.0 in the run",
        """'payload.store' is "frames" there and "files" in the run""",
    ):
        assert text in reason
    assert "rollway serve run.toml --env NAME" in reason


def test_a_key_that_is_not_set_is_named(shop: Workspace) -> None:
    env = {name: value for name, value in os.environ.items() if name != "SHOP_KEY"}
    command = [sys.executable, "-m", "rollway", "serve", str(shop.file)]
    done = subprocess.run(
        command, cwd=shop.folder, env=env, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 1
    assert "the environment variable SHOP_KEY is not set" in done.stderr
