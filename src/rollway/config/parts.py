"""What each process of a run is given at its start: its own section, never the whole file."""

from msgspec import Struct

from ..records.ids import Step
from ..records.turn import Sampling
from .sections import (
    EngineConfig,
    EnvConfig,
    ModelConfig,
    OrchestratorConfig,
    PayloadConfig,
    TrainerConfig,
    WarmupConfig,
    WatchConfig,
)


class EnginePart(Struct, frozen=True):
    """The embedded engine: which weights, under which name and version."""

    model: ModelConfig
    engine: EngineConfig
    weights: str
    version: int
    seed: int
    watch: WatchConfig


class RouterPart(Struct, frozen=True):
    """One environment's server."""

    env: EnvConfig
    model: ModelConfig
    engine: EngineConfig
    engine_url: str
    payload: PayloadConfig
    payload_dir: str
    log_dir: str
    seed: int
    watch: WatchConfig


class WorkerPart(Struct, frozen=True):
    """One worker of an environment's server."""

    name: str
    address: str
    board_fd: int
    """An inherited file: where it shows whose code is running."""
    server: RouterPart

    @property
    def watch(self) -> WatchConfig:
        return self.server.watch


class EnvAddress(Struct, frozen=True):
    """Where the orchestrator finds an environment, and its share."""

    id: str
    address: str
    ratio: float


class OrchestratorPart(Struct, frozen=True):
    """The orchestrator: bounds, addresses and where to go on."""

    orchestrator: OrchestratorConfig
    sampling: Sampling
    envs: tuple[EnvAddress, ...]
    engine_url: str
    push_weights: str
    """Weights an engine of the user's must load first, empty for our own, …"""
    has_weights_if: tuple[str, ...]
    """… unless it says that it has one of these versions: it was started with them."""
    request_deadline_s: float
    micro_batch_tokens: int
    payload: PayloadConfig
    max_outstanding: int
    max_steps: int
    first_step: Step
    cursors: dict[str, int]
    run_dir: str
    watch: WatchConfig


class TrainerPart(Struct, frozen=True):
    """The trainer: where to start, what to read, what to write."""

    trainer: TrainerConfig
    weights: str
    checkpoint: str
    first_step: Step
    max_steps: int
    run_dir: str
    seed: int
    watch: WatchConfig


class WarmupPart(Struct, frozen=True):
    """The warm-up: a tiny model taught by one environment's answers."""

    warmup: WarmupConfig
    model: ModelConfig
    env: EnvConfig
    max_context: int
    seed: int
    watch: WatchConfig
