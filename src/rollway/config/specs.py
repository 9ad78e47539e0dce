"""What each process is given at its start: its own sections of the run file, never the whole file."""

from typing import Literal

from msgspec import Struct

from ..records.ids import Step
from ..records.restored import Restored
from ..records.turn import Sampling
from .sections import (
    DifficultyConfig,
    EngineConfig,
    EnvConfig,
    EvalConfig,
    FiltersConfig,
    MetricsConfig,
    ModelConfig,
    OrchestratorConfig,
    PayloadConfig,
    RetriesConfig,
    TrainerConfig,
    TransportConfig,
    WarmupConfig,
    WatchConfig,
)


class WatchSpec(Struct, frozen=True, kw_only=True):
    """How a process watches its event loop: the run file's `[watch]`, and what no run file sets."""

    stall_ms: float = 100.0
    tick_ms: float = 10.0
    """How often lateness is sampled. A tick costs 20 µs."""
    warn_p90_ms: float | None = 20.0
    warn_p99_ms: float | None = 50.0
    warn_max_ms: float | None = 250.0
    """A second whose lag is above one of these three is warned about. None never warns."""


def watch_spec(config: WatchConfig) -> WatchSpec:
    return WatchSpec(stall_ms=config.stall_ms)


Speaks = Literal["tokens", "messages"]


class EngineSpec(Struct, frozen=True):
    """The embedded engine: which weights it loads, and the version these are."""

    model: ModelConfig
    engine: EngineConfig
    weights: str
    version: int
    seed: int
    watch: WatchSpec
    listen_fd: int | None = None
    """An inherited socket to serve at. Without one the engine binds `engine.embedded.port`."""


class VllmSpec(Struct, frozen=True):
    """One vLLM server. It starts with the model of the run; the orchestrator loads newer weights."""

    model: ModelConfig
    engine: EngineConfig
    replica: int
    port: int
    seed: int
    log: str | None
    """Where the output of vLLM goes; None means that of this process."""
    watch: WatchSpec


class ServerLimits(Struct, frozen=True, kw_only=True):
    """Bounds of an env server that no run file sets."""

    client_lease_s: float = 30.0
    """Cancel the rollouts of a client that sends nothing for this long. Clients ping every 2 s."""
    max_waiting: int = 20_000
    """Rollouts of one client that may wait for a worker. More fail at once, to bound the memory."""
    idle_s: float = 60.0
    """End a worker beyond `min_workers` that has run nothing for this long."""
    drain_s: float = 30.0
    """After SIGTERM, running rollouts have this long to finish."""
    scoring_memory_mb: int = 4096
    """Memory that a scoring process may take beyond what it has once the environment is loaded."""
    plain_processes: int = 8
    """Processes of one worker for rollouts, updates and tools written without `async`."""
    segment_mb: int = 64
    """Size at which a worker starts a new segment. Deleting larger files stalls a virtual machine."""
    frames_mb: int = 64
    """Payload frames of one worker that may be under way; further rollouts wait to commit."""


class RouterSpec(Struct, frozen=True):
    env: EnvConfig
    model: ModelConfig
    engine: EngineConfig
    engine_urls: tuple[str, ...]
    payload: PayloadConfig
    payload_dir: str
    log_dir: str
    seed: int
    watch: WatchSpec
    speaks: Speaks = "tokens"
    """What the engine takes: token ids, or only chat messages."""
    generation: int = 0
    """Grows when a run is resumed. Every generation names its segments differently."""
    is_training: bool = True
    """The engine samples from versions that a run publishes. An evaluation knows nothing of these."""
    bind: str | None = None
    """Where clients connect. Without it, at a unix socket in a private folder."""
    keys: str | None = None
    """Folder with the server's keys. Required for a port."""
    reports_to_parent: bool = False
    """Send the statistics of all workers to the parent process, which has no other way to get them."""
    limits: ServerLimits = ServerLimits()
    terms: dict[str, str] = {}
    """What clients are told of this server when they connect (`terms.py`)."""


class WorkerSpec(Struct, frozen=True):
    place: int
    """The worker's number among those that run at the same time. Its successor gets the same place."""
    place_name: str
    """The name of the place, such as `math.w0`."""
    life: int
    """How many workers had this place before."""
    address: str
    board_fd: int
    """An inherited file in which the worker shows whose code is running."""
    server: RouterSpec
    source: bytes | None = None
    """The text of the environment's file when its server started. An edit does not mix two versions."""
    is_patient: bool = False
    """Wait for an engine that does not answer. The first worker does not: it reports the mistake."""

    @property
    def name(self) -> str:
        return f"{self.place_name}.{self.life}"

    @property
    def watch(self) -> WatchSpec:
        return self.server.watch


class EnvAddress(Struct, frozen=True):
    """Where the orchestrator finds an environment's server."""

    id: str
    address: str
    keys: str | None = None
    needs_frames: bool = False
    """The server writes no file that this run can open, so its payload must come as frames."""
    terms: dict[str, str] = {}
    """What the run expects of a server that it did not start (`terms.py`)."""


class CoreSpec(Struct, frozen=True):
    """What the orchestrator's core is given: some sections, and what follows from the others."""

    orchestrator: OrchestratorConfig
    ratios: dict[str, float]
    """Environments by id, with their share of the groups."""
    max_steps: int
    max_outstanding: int
    """Rollouts that may be dispatched and not yet trained or dropped."""
    payload_bytes: int
    micro_batch_tokens: int
    ranks: int = 1
    num_workers: int = 1
    """Env workers, as far as the run file tells."""
    retries: RetriesConfig = RetriesConfig()
    difficulty: DifficultyConfig = DifficultyConfig()
    filters: FiltersConfig = FiltersConfig()
    eval: EvalConfig | None = None


class OrchestratorSpec(Struct, frozen=True):
    """The orchestrator: its rules, the servers it talks to, and where the run starts."""

    core: CoreSpec
    sampling: Sampling
    envs: tuple[EnvAddress, ...]
    engine_urls: tuple[str, ...]
    engine: EngineConfig
    weights: str
    """Folder of version `first_step - 1`, for engines that do not have it."""
    model_path: str
    """The model that the run started from, whose config.json tells its shape."""
    must_push: bool
    """Load the first weights into all engines, whatever version they report: it may be another run's."""
    payload: PayloadConfig
    transport: TransportConfig
    first_step: Step
    run_dir: str
    watch: WatchSpec
    restored: Restored = Restored()
    generation: int = 0


class SinksSpec(Struct, frozen=True):
    """The process that sends steps to W&B and TensorBoard."""

    metrics: MetricsConfig
    run_dir: str


class TrainerSpec(Struct, frozen=True):
    """The trainer: where it starts, what it reads, what it writes."""

    trainer: TrainerConfig
    transport: TransportConfig
    model: ModelConfig
    """The model that the run started from: version 0."""
    weights: str
    """The version before `first_step`, as it was published."""
    first_step: Step
    max_steps: int
    run_dir: str
    seed: int
    watch: WatchSpec
    probes_cache: bool = False
    """Probe also the prefix caches of engines, which the embedded engine does not have."""
    max_kept_bytes: int = 8 << 30
    """Save the state as soon as the batches since the last one take more than this."""


class OrchestratorAddress(Struct, frozen=True):
    """The trainer receives this once it is known; empty if batches come through the run directory."""

    address: str


class WarmupSpec(Struct, frozen=True):
    """The warm-up: a tiny model that imitates the answers of one environment."""

    warmup: WarmupConfig
    model: ModelConfig
    env: EnvConfig
    max_context: int
    seed: int
    watch: WatchSpec
