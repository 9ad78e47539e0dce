"""What each process of a run is given at its start: its own section, never the whole file."""

from msgspec import Struct

from ..records.ids import Step
from ..records.restored import Restored
from ..records.turn import Sampling
from .address import ANY_LOOPBACK_PORT
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


class EngineSpec(Struct, frozen=True):
    """The embedded engine: which weights, under which name and version."""

    model: ModelConfig
    engine: EngineConfig
    weights: str
    version: int
    seed: int
    watch: WatchConfig
    listen_fd: int = -1
    """An inherited socket to serve at, which its parent keeps for the next engine; -1: one of its
    own, at `engine.port`."""


class RouterSpec(Struct, frozen=True):
    """One environment's server. `keys` is a folder, needed where `bind` is beyond loopback;
    `tells_parent` is for a parent that has no wire to hear the workers' statistics on."""

    env: EnvConfig
    model: ModelConfig
    engine: EngineConfig
    engine_urls: tuple[str, ...]
    payload: PayloadConfig
    payload_dir: str
    log_dir: str
    seed: int
    watch: WatchConfig
    filters: FiltersConfig = FiltersConfig()
    generation: int = 0
    """How often the run was resumed: each time segments have names of their own."""
    bind: str = ANY_LOOPBACK_PORT
    keys: str = ""
    tells_parent: bool = False


class WorkerSpec(Struct, frozen=True):
    """One worker of an environment's server."""

    name: str
    address: str
    board_fd: int
    """An inherited file: where it shows whose code is running."""
    server: RouterSpec
    is_patient: bool = False
    """Whether it waits for an engine that is away; when a server starts, that is a mistake."""

    @property
    def watch(self) -> WatchConfig:
        return self.server.watch


class EnvAddress(Struct, frozen=True):
    """Where the orchestrator finds an environment, and its share; `keys` is a folder, or empty.
    With `must_land` its payload has to come as frames: its server sees no folder of the run."""

    id: str
    address: str
    ratio: float
    keys: str = ""
    must_land: bool = False


class OrchestratorSpec(Struct, frozen=True):
    """The orchestrator: bounds, addresses and where to go on."""

    orchestrator: OrchestratorConfig
    sampling: Sampling
    envs: tuple[EnvAddress, ...]
    engine_urls: tuple[str, ...]
    engine: EngineConfig
    weights: str
    """Folder of version `first_step - 1`, for engines that do not have it."""
    must_push: bool
    """Whether engines are given it whatever they say: their versions may be another run's."""
    micro_batch_tokens: int
    payload: PayloadConfig
    max_outstanding: int
    max_steps: int
    first_step: Step
    run_dir: str
    watch: WatchConfig
    filters: FiltersConfig = FiltersConfig()
    retries: RetriesConfig = RetriesConfig()
    difficulty: DifficultyConfig = DifficultyConfig()
    eval: EvalConfig = EvalConfig()
    transport: TransportConfig = TransportConfig()
    ranks: int = 1
    restored: Restored = Restored()
    generation: int = 0


class SinksSpec(Struct, frozen=True):
    """The process that passes steps on to W&B and TensorBoard."""

    metrics: MetricsConfig
    run_dir: str


class TrainerSpec(Struct, frozen=True):
    """The trainer: where to start, what to read, what to write."""

    trainer: TrainerConfig
    transport: TransportConfig
    weights: str
    optimizer: str
    """File with the state to go on with; empty for a new one."""
    first_step: Step
    max_steps: int
    run_dir: str
    seed: int
    watch: WatchConfig


class OrchestratorAddress(Struct, frozen=True):
    """What the trainer is told once it is known: where the orchestrator waits for it; empty if batches
    come through the run directory."""

    address: str


class WarmupSpec(Struct, frozen=True):
    """The warm-up: a tiny model taught by one environment's answers."""

    warmup: WarmupConfig
    model: ModelConfig
    env: EnvConfig
    max_context: int
    seed: int
    watch: WatchConfig
