"""A router under fire: random and mutated frames at its client port while a real client runs rollouts.

    python bench/hostile.py [--full] [--frames 100000] [--peers 3] [--rollouts 32] [--json FILE]

*Strangers* never say Hello and throw whatever a peer can throw: noise, messages with bytes changed, cut
or added, messages only workers may send, many frames at once, nesting without end. *Greeters* say Hello,
well or badly, as fast as they can, and never read an answer. A real client keeps rollouts running
through the same port. Exits with 1 if the router died, if it holds 20 MB more than before, or if a real
rollout did not settle exactly once as scored. Of drops the router says every power of two. A *control*
process only ticks.
"""

import asyncio
import random
import re
import sys
import time
from argparse import Namespace
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import zmq
from loopback import talk
from loopback.control import tick
from loopback.engine import EngineSpec, serve
from loopback.processes import Started, rss_bytes, started
from loopback.report import arguments, finish, lag_figures, table
from loopback.server import LOG, env_server

import rollway as rw
from rollway.config.sections import EnvConfig, ServerConfig
from rollway.envserver import client as envs
from rollway.loop.watch.lag import merge
from rollway.records.ids import PolicyVersion, RolloutId, WorkerName
from rollway.records.lag import LagStats, ProcessStats
from rollway.records.rollout import Cancelled, Scored, Settled
from rollway.records.turn import Sampling
from rollway.wire.messages import (
    Cancel,
    FrameTaken,
    Hello,
    NewPolicy,
    NextTasks,
    Ping,
    RolloutPhases,
    Run,
    ServerStats,
    Tasks,
    encode,
)

MAX_GROWTH_BYTES = 20 << 20
WARM_S, AFTER_S = 3.0, 3.0
COLUMNS = (
    "frames/s",
    "MB before",
    "MB after",
    "grown MB",
    "drops ≥",
    "settled",
    "p99 ms",
    "max ms",
)
ENGINE = EngineSpec(layers=2, slots=2, drawn=8)

RUN = Run(RolloutId("evil"), 1, rw.Task("1", "go on"), Sampling(8), PolicyVersion(0), 0)
CANCEL, TAKEN = (
    Cancel(RolloutId("evil"), "evil"),
    FrameTaken(WorkerName("talk.w0.0"), 1 << 40),
)
SETTLED = Settled(RolloutId("r1"), 1, WorkerName("talk.w0.0"), Cancelled("evil"))
STATS = ServerStats(ProcessStats("evil", LagStats(), 1))
BY_STRANGERS = (RUN, CANCEL, NextTasks(0, 3), NewPolicy(PolicyVersion(9)), Ping(), TAKEN, SETTLED,
                Tasks(0, ()), RolloutPhases(WorkerName("talk.w0.0"), ()), STATS)  # fmt: skip
BY_GREETERS = (Hello("evil"), CANCEL, Ping(), TAKEN)


def mutated(frame: bytes, chance: random.Random) -> bytes:
    changed = bytearray(frame)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(changed) + 1)
        match chance.randrange(3):
            case 0:
                changed[at : at + 1] = chance.randbytes(1)
            case 1:
                del changed[at:]
            case 2:
                changed[at:at] = chance.randbytes(chance.randint(1, 8))
    return bytes(changed)


def message(valid: list[bytes], chance: random.Random) -> list[bytes]:
    match chance.randrange(8):
        case 0 | 1:
            return [chance.randbytes(chance.randint(0, 400))]
        case 2 | 3:
            return [chance.choice(valid)]
        case 4 | 5 | 6:
            return [mutated(chance.choice(valid), chance)]
        case _:
            return [
                mutated(chance.choice(valid), chance) for _ in range(chance.randint(2, 20))
            ]


def throw(pipe: Connection, address: str, count: int, seed: int, greets: bool) -> None:
    """One hostile peer; says how long it took until everything was delivered."""
    chance = random.Random(seed)
    valid = [encode(message) for message in (BY_GREETERS if greets else BY_STRANGERS)]
    prepared = [message(valid, chance) for _ in range(min(count, 20_000))]
    prepared[::5_000] = [[b"\x91" * 1_000_000] for _ in prepared[::5_000]]
    pipe.recv()
    start_s = time.monotonic()
    with zmq.Context() as context, context.socket(zmq.DEALER) as wire:
        wire.setsockopt(zmq.IDENTITY, b"\xff evil \n" + bytes([seed + 1]))
        wire.connect(address)
        for number in range(count):
            wire.send_multipart(prepared[number % len(prepared)])
    pipe.send(time.monotonic() - start_s)
    pipe.recv()


class Real:
    """The client that has work to do: keeps rollouts running, and counts how they end."""

    def __init__(self, client: envs.EnvClient, rollouts: int) -> None:
        self._client = client
        self._rollouts = rollouts
        self._open: set[str] = set()
        self._number = 0
        self.settled = 0
        self.wrong: list[str] = []
        self.lag = LagStats()

    async def start(self) -> None:
        self._number += 1
        id = f"r{self._number}"
        self._open.add(id)
        task = rw.Task(id=id, prompt="go on", answer="1")
        await self._client.send(Run(RolloutId(id), 1, task, Sampling(8), PolicyVersion(0), 0))

    async def hear(self, *, go_on: bool) -> None:
        match await self._client.receive():
            case Settled(rollout_id=id, outcome=outcome):
                if id not in self._open or not isinstance(outcome, Scored):
                    self.wrong.append(f"{id}: {outcome}")
                self._open.discard(id)
                self.settled += 1
                if go_on:
                    await self.start()
            case ServerStats(stats=stats) if ".w" not in stats.process:
                self.lag = merge(self.lag, stats.lag)

    async def run(self, peers: list[Started], warm_s: float) -> None:
        """Real work alone, then under fire until the last peer has delivered, then to its end."""
        for _ in range(self._rollouts):
            await self.start()
        await self.serve(warm_s)
        self.lag = LagStats()
        for peer in peers:
            peer.pipe.send("now")
        while not all(peer.pipe.poll() for peer in peers):
            await self.serve(0.2)

    async def serve(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            await self.hear(go_on=True)

    async def finish(self, deadline_s: float = 60.0) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                while self._open:
                    await self.hear(go_on=False)
        except TimeoutError:
            self.wrong += [f"{id}: never settled" for id in sorted(self._open)]


async def under_fire(
    url: str, folder: Path, control: Started, args: Namespace
) -> tuple[dict[str, dict[str, float]], list[str]]:
    env = EnvConfig(
        id=talk.__file__,
        args={"turns": 1},
        server=ServerConfig(workers=1, concurrency=args.rollouts),
    )
    each = args.frames // args.peers
    async with env_server(env, url, folder) as server:
        peers = [
            Started(throw, (server.address, each, seed, seed == 0))
            for seed in range(args.peers)
        ]
        try:
            real = Real(server.client, args.rollouts)
            await real.run([], WARM_S)
            before = rss_bytes(server.pid)
            control.ask()
            await real.run(peers, 0.0)
            fire_s = max(peer.pipe.recv() for peer in peers)
            beside = lag_figures(control.ask())
            await real.serve(AFTER_S)
            await real.finish()
            after = rss_bytes(server.pid)
        finally:
            for peer in peers:
                peer.end()
    log = folder / LOG
    figures = {
        "frames/s": each * args.peers / fire_s,
        "MB before": before / 1e6,
        "MB after": after / 1e6,
        "grown MB": (after - before) / 1e6,
        "drops ≥": sum(counted(log.read_text())),
        "settled": real.settled,
        **lag_figures(real.lag),
    }
    return {"router": figures, "control beside": beside}, real.wrong


def counted(log: str) -> list[int]:
    """The last figure the router said of each kind of drop; it says every power of two."""
    kinds = (r"dropped bad frame (\d+)", r"dropped message (\d+)")
    return [max(map(int, re.findall(kind, log)), default=0) for kind in kinds]


def main() -> None:
    args = arguments(
        __doc__, frames=(100_000, "hostile messages"), peers=(3, "hostile peers, the first a greeter"),
        rollouts=(32, "real rollouts at a time"),
    )  # fmt: skip
    if args.full:
        args.frames = max(args.frames, 1_000_000)
    with (
        started(serve, ENGINE) as engine,
        started(tick) as control,
        TemporaryDirectory() as folder,
    ):
        from rollway.model.tiny import write_tokenizer

        write_tokenizer(Path(folder))
        url = f"http://127.0.0.1:{engine.pipe.recv()}"
        rows, wrong = asyncio.run(under_fire(url, Path(folder), control, args))
    print(
        f"{args.frames} hostile messages of {args.peers} peers, {args.rollouts} real rollouts at a time"
    )
    table(rows, COLUMNS)
    finish("hostile", {"frames": args.frames, **rows, "wrong": len(wrong)}, args.json)
    grown = rows["router"]["grown MB"]
    if grown * 1e6 > MAX_GROWTH_BYTES:
        wrong.append(f"the router holds {grown:.1f} MB more than before")
    for line in wrong[:20]:
        print(line, file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
