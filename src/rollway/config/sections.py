"""The sections of a run file. This module holds every key with its range, its default and its meaning.

An optional part of a run is an optional section: leave it out to switch the part off. Two sections that
exclude each other (a part to start, and one that runs already) are optional too: `load.py` refuses a
file that has both of them.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
LearningRate = Annotated[float, Meta(gt=0, le=10)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
FilterMode = Literal["monitor", "enforce"]
ENGINE_KEY_VAR = "ROLLWAY_ENGINE_KEY"
"""Environment variable with the key that rollway's plug-in for vLLM demands."""
DEFAULT_CONTEXT = 4096
"""Tokens of a conversation with the embedded engine, unless the run file says otherwise."""


class Section(Struct, frozen=True, forbid_unknown_fields=True):
    """A section of a run file. Unknown keys are refused."""


class ModelConfig(Section, frozen=True):
    """Which model to start from, and how its messages become tokens."""

    path: str
    """Folder of the model, with `config.json`, weights and `tokenizer.json`; or its name on the Hugging
    Face hub, such as `Qwen/Qwen3-0.6B`, from which it is downloaded once."""
    renderer: str = "auto"
    """How messages become tokens: the name of a model family (`qwen3`, `glm-5`, …), `default` to use the
    model's own chat template, or `auto` to choose by the model's name."""
    template: dict[str, Any] = field(default_factory=dict)
    """Options of the renderer, such as `enable_thinking`."""
    trust_remote_code: bool = False
    """Run the Python code that comes with the model. Models that need such code are refused without."""


class WarmupConfig(Section, frozen=True):
    """Builds a tiny model at `model.path` if that folder does not exist, and teaches it by imitation
    until it solves some tasks of the first environment, which must have answers. Meant for demos and
    tests."""

    experts: Natural = 8
    """Experts in each layer of the model. With 0 it is dense: no Mixture-of-Experts."""

    solve_rate: Fraction = 0.2
    """Stop as soon as the model gives the right answer with this probability, on average."""
    max_steps: Count = 600
    """Give up after this many steps."""
    batch_size: Count = 64
    """Answers that one step imitates."""
    lr: LearningRate = 2e-3
    """Learning rate."""


class ServerConfig(Section, frozen=True):
    """The env server that rollway starts for this environment: its workers and their deadlines."""

    workers: Count = 2
    """The largest number of worker processes."""
    min_workers: Count | None = None
    """The smallest number of worker processes. More start while rollouts wait for a worker, and idle
    ones end. Without this key all `workers` run from the start."""
    concurrency: Count = 64
    """Rollouts that one worker runs at the same time."""
    lease_s: Annotated[float, Meta(ge=2)] = 10.0
    """A worker that is silent for this long is killed. The rollout that held its event loop fails; its
    others run again in another worker."""
    rollout_deadline_s: Positive = 300.0
    """A rollout that runs longer fails with boundary `deadline`."""
    scoring_processes: Count | None = None
    """Processes in each worker for rewards without `async`. Each scores one rollout at a time. Without
    this key the CPU cores are shared out among the workers, up to 8 for each."""
    scoring_deadline_s: Positive = 60.0
    """A reward that runs longer is killed, and its rollout fails with boundary `scorer`."""
    tool_deadline_s: Positive = 60.0
    """A tool call that runs longer is ended. The toolset decides whether this fails the rollout."""


class ExternalServerConfig(Section, frozen=True):
    """An env server that `rollway serve` runs elsewhere. Rollway connects to it and starts none."""

    address: str
    """Address of the server: `ipc://path` as `rollway serve` prints it, or `tcp://host:port`."""
    keys: str | None = None
    """Folder with this client's keys (`rollway keys new`). Every `tcp://` address requires them."""
    shares_payload: bool = False
    """The server writes into this run's `payload/` (`rollway serve --payload files`). If not, set
    `payload.store` to `frames`."""


class EnvConfig(Section, frozen=True):
    """One environment of the run. Repeat the section to train on several."""

    id: str
    """Name of a registered environment, a module (`package.module`), or a file (`path/to/file.py`)."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment's `load_environment`. A server elsewhere must have them."""
    ratio: Positive = 1.0
    """Share of the groups that this environment gets, relative to the other environments."""
    server: ServerConfig | None = None
    external: ExternalServerConfig | None = None
    """With this section the run connects to a server elsewhere. `server` then says how `rollway serve`
    runs it, if it is started from this file."""

    @property
    def local(self) -> ServerConfig:
        """The server that this run starts. Only valid without an `external` one."""
        assert self.external is None
        return self.server or ServerConfig()


class SamplingConfig(Section, frozen=True):
    """How the engine samples training rollouts."""

    max_tokens: Count = 1024
    """The largest number of tokens the policy generates in one turn."""
    temperature: Positive = 1.0
    """Engine and trainer both divide the logits by this number."""


class EmbeddedEngineConfig(Section, frozen=True):
    """The embedded engine, which rollway starts itself. It needs `rollway[local]`."""

    port: Port | None = None
    """Port on 127.0.0.1. Without this key the engine takes any free port."""
    max_batch: Count = 128
    """Requests that the engine decodes at the same time."""
    threads: Count = 1
    """Torch threads of the engine."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format the engine computes in."""


class VllmConfig(Section, frozen=True):
    """vLLM, which rollway starts itself at 127.0.0.1, with the flags that training needs. A run ends it,
    and starts it again if it dies."""

    command: str = "vllm"
    """The program that starts vLLM. It may lie in another venv: `.venv-vllm/bin/vllm`."""
    replicas: Count = 1
    """How many vLLM servers to start, each with the whole model."""
    gpus: tuple[Natural, ...] | None = None
    """The GPUs to use, by number. Without this key rollway takes those of `CUDA_VISIBLE_DEVICES`, or all
    that the machine has. Without any GPU vLLM computes on the CPU."""
    gpus_a_replica: Count = 1
    """GPUs that share the model of one replica (tensor parallelism)."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Number format of vLLM. Without this key `bfloat16` on GPUs and `float32` on a CPU."""
    port: Port | None = None
    """Port of the first replica; the others take the ports after it. Without this key any free ports."""
    args: tuple[str, ...] = ()
    """Further arguments of `vllm serve`, such as `["--gpu-memory-utilization", "0.6"]`."""
    env: dict[str, str] = field(default_factory=dict)
    """Further environment variables of vLLM."""


class ExternalEngineConfig(Section, frozen=True):
    """vLLM or SGLang servers that run already. Rollway uses them instead of the embedded engine."""

    url: str | Annotated[tuple[str, ...], Meta(min_length=1)]
    """Address of the engine, such as `http://localhost:8000`, or a list of them for the same model."""
    model: str | None = None
    """The engine's name for the model. Without this key rollway takes the first one it lists."""
    key_var: str | None = None
    """Environment variable that holds the engine's API key."""
    fill_ids: bool = False
    """Train also on a chat endpoint that takes no token ids and no weights. Rollway makes the token ids
    that its replies lack from their text, and marks these rows as approximate."""

    @property
    def urls(self) -> tuple[str, ...]:
        return self.url if isinstance(self.url, tuple) else (self.url,)


class EngineConfig(Section, frozen=True):
    """The inference engine: the embedded one, unless `[engine.vllm]` starts vLLM or `[engine.external]`
    names engines that run already."""

    max_context: Count | None = None
    """The largest number of tokens of a conversation: its prompt and its reply together. Without this
    key vLLM, or an engine that runs already, decides; the embedded engine takes 4096 tokens. It never
    takes more than the model's positions are made for."""
    request_deadline_s: Positive = 120.0
    """A request that takes longer fails its rollout with boundary `engine`."""
    patience_s: Positive = 180.0
    """How long rollouts wait while no engine answers. After that the run stops and says why."""
    routes: bool | None = None
    """Ask the engine which experts it chose for every token, so that the trainer can replay them.
    Without this key rollway asks if the model has experts."""
    verify: bool = True
    """After each load of weights, ask the engine for the logprobs of a few texts and compare them with
    the trainer's. An engine that has other weights draws nothing that is trained."""
    embedded: EmbeddedEngineConfig | None = None
    vllm: VllmConfig | None = None
    external: ExternalEngineConfig | None = None

    @property
    def is_embedded(self) -> bool:
        return self.vllm is None and self.external is None

    @property
    def local(self) -> EmbeddedEngineConfig:
        """The embedded engine. Only valid if the run has no other one."""
        assert self.is_embedded
        return self.embedded or EmbeddedEngineConfig()

    @property
    def embedded_context(self) -> int:
        return self.max_context or DEFAULT_CONTEXT

    @property
    def urls(self) -> tuple[str, ...]:
        """Addresses of external engines; empty for those that rollway starts."""
        return self.external.urls if self.external else ()

    @property
    def model(self) -> str | None:
        return self.external.model if self.external else None

    @property
    def key_var(self) -> str | None:
        """The environment variable with the key of the engines. A run makes one up for its own."""
        return self.external.key_var if self.external else ENGINE_KEY_VAR


class LengthPenaltyConfig(Section, frozen=True):
    """Makes long right answers worth less than short ones. Wrong answers are not changed."""

    weight: Positive
    """Reward that the longest right answer of a group loses; the shortest loses nothing."""
    by: Literal["tokens", "turns"] = "tokens"
    """What the length of an answer is counted in."""


class OrchestratorConfig(Section, frozen=True):
    """What runs, what trains, and what is thrown away."""

    batch_size: Count = 64
    """Rollouts of one optimizer step."""
    batch_tokens: Count | None = None
    """Tokens of one optimizer step, prompts included. With this key a batch ships once it has this many
    tokens, however many rollouts that takes; `batch_size` is then only the first estimate."""
    group_size: Annotated[int, Meta(ge=2)] = 8
    """Rollouts of one task."""
    max_off_policy_steps: Natural = 1
    """Versions a rollout may be behind the trained weights. With 0, generating waits for training."""
    max_in_flight: Count = 256
    """The largest number of rollouts that run at the same time."""
    adapt_in_flight: bool = False
    """Start with one group for each worker and double that until the engine is busy. Then run fewer
    rollouts than `max_in_flight` while the engine reports more waiting than running requests, while its
    cache is nearly full, or while the loops of workers are late."""
    rollouts_a_minute: Positive | None = None
    """The largest number of rollouts started in a minute, for tools or judges with a rate limit."""
    stragglers_after: Annotated[float, Meta(gt=0, lt=1)] | None = None
    """Once this share of a group has settled, the rest is cancelled after 30 s and the group trains
    without it, which favours short rollouts. Without this key a group waits for all its rollouts."""
    env_patience_s: Positive = 120.0
    """If no rollout of an environment settles for this long, the environment gets no new rollouts until
    one settles."""
    max_useless_groups: Count = 500
    """If this many groups in a row give nothing to train on, the run stops and says why."""
    advantage: Annotated[str, Meta(min_length=1)] = "grpo"
    """How rewards become advantages: `grpo` (reward minus the mean of its group), `rloo` (minus the mean
    of the others), `grpo_std` and `grpo_max` (grpo divided by the standard or largest deviation of the
    group), or a function of your own: `path/to/file.py:function` or `package.module:function`."""
    correct_at: float = 1.0
    """An answer is right if its reward is at least this."""
    length_penalty: LengthPenaltyConfig | None = None
    save_rollouts: bool = True
    """Write every settled rollout to `rollouts/step_N/train.jsonl`."""
    keep_weights: Count = 2
    """How many versions of the weights stay on disk once the engine has loaded newer ones."""


class RetriesConfig(Section, frozen=True):
    """How often a failed rollout runs again, by its boundary. A rollout never runs again after a failed
    reward, after its deadline, or if its environment needs whole groups. At most a tenth of all
    rollouts are retries."""

    env: Natural = 0
    """Retries after a failure in the environment's own code."""
    engine: Natural = 2
    """Retries after the engine refused a request or sent a reply that cannot be used."""
    worker: Natural = 1
    """Retries of a rollout that lost several workers."""


class DifficultyConfig(Section, frozen=True):
    """Tasks that are always or never solved teach little. They move to pools of easy and hard tasks,
    which get 5 % and 10 % of the groups. One group with another result moves the task back."""

    easy_at: float | None = None
    """A task is easy if its group has at least this mean reward. Without this key none is easy."""
    hard_at: float | None = None
    """A task is hard if its group has at most this mean reward. Without this key none is hard."""


class EvalConfig(Section, frozen=True):
    """Evaluates the policy on the tasks of `eval_tasks()` before the first step, every few steps and
    after the last one. At most a quarter of the running rollouts are evaluation; they never train."""

    every: Count
    """Steps from one evaluation to the next."""
    num_tasks: Count = 64
    """Tasks of each environment."""
    num_rollouts: Count = 4
    """Rollouts of each task."""
    envs: tuple[str, ...] | None = None
    """Ids of the environments to evaluate. Without this key all of them are."""
    temperature: Positive = 1.0
    """Temperature of evaluation rollouts."""
    max_tokens: Count | None = None
    """Most tokens generated in one turn. Without this key `sampling.max_tokens` applies."""


class FiltersConfig(Section, frozen=True):
    """Rollouts that are not worth training on. `monitor` counts them, `enforce` also leaves them out."""

    zero_advantage: FilterMode = "enforce"
    """Groups in which all rollouts have the same reward."""
    gibberish: FilterMode = "monitor"
    """Rollouts with a rare token at a place where it was very unlikely."""
    repetition: FilterMode = "monitor"
    """Rollouts with thousands of tokens in a row that were each almost certain: a loop."""


class TrainerConfig(Section, frozen=True):
    """The trainer that rollway starts. It needs `rollway[local]`."""

    lr: LearningRate = 1e-6
    """Learning rate of AdamW. The default suits models of a billion weights and more; the tiny models of
    the examples need about a thousand times as much."""
    lr_ramp_steps: Natural = 0
    """Steps over which the learning rate rises from 0 to `lr`."""
    weight_decay: NonNegative = 0.0
    """Weight decay of AdamW."""
    max_grad_norm: Positive = 1.0
    """A gradient with a larger norm is scaled down to this norm."""
    clip_low: Fraction = 0.2
    """An importance ratio below `1 - clip_low` gives no gradient that would lower it further."""
    clip_high: NonNegative = 0.28
    """An importance ratio above `1 + clip_high` gives no gradient that would raise it further."""
    micro_batch_tokens: Count = 4096
    """Tokens packed into one forward pass. A longer row gets a pass to itself."""
    replay_routes: bool = True
    """Replay the engine's expert choices in the Mixture-of-Experts layers."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format the trainer computes in. The weights that it updates are always kept in float32."""
    publish_dtype: Literal["float32", "bfloat16"] | None = None
    """Number format of the weights that engines load. Without this key it is `dtype`."""
    activation_checkpointing: bool = False
    """Compute activations twice instead of keeping them: less memory, about a third more time."""
    threads: Count = 1
    """Torch threads of each rank."""
    checkpoint_every: Count = 10
    """Steps from one checkpoint to the next. The last step always writes one. A trainer that dies trains
    the batches since its last saved state again, which is at least as new."""
    keep_checkpoints: Count = 3
    """How many checkpoints stay on disk."""
    ranks: Count = 1
    """Processes that train together; each takes a part of every batch."""


class ExternalTrainerConfig(Section, frozen=True):
    """Start no trainer: one of your own takes the batches, with `rollway.transport.open_batches`."""

    micro_batch_tokens: Count = 4096
    """Tokens packed into one micro-batch. A longer row gets a micro-batch to itself."""
    ranks: Count = 1
    """Processes of your trainer; every batch is packed for this many."""


class PayloadConfig(Section, frozen=True):
    """Where token ids, logprobs and other columns of rollouts are kept on their way to the trainer."""

    store: Literal["files", "frames"] = "files"
    """`files`: workers write into the run directory. `frames`: workers do not share a file system with
    the run, so the columns travel with each rollout's record and the orchestrator writes them."""
    durability: Literal["process", "host"] = "process"
    """What the columns survive once a rollout has settled: `process` the death of the worker, `host`
    also a power failure (every rollout then waits for the disk)."""
    budget_mb: Count = 16_384
    """Most payload that is written and not yet trained. Fewer rollouts start as it fills up. The trainer
    keeps up to half as much of trained batches, until it has saved its state."""


class ZmqTransportConfig(Section, frozen=True):
    """Send batches to the trainer through a socket. A trainer that restarts gets its unfinished batches
    again. Without this section batches are files in the run directory, which the trainer must see."""

    payload: Literal["files", "frames"] = "files"
    """The trainer reads the payload in the run directory (`files`) or is sent its bytes (`frames`). A
    trainer of your own chooses when it connects."""
    bind: str | None = None
    """Address at which the orchestrator waits for the trainer: `tcp://host:port`, where `*` takes any
    free port. Without this key it is a unix socket that only this user can reach."""
    keys: str | None = None
    """The orchestrator's keys (`keys/server`), required with `bind`."""
    trainer_keys: str | None = None
    """Folder with the keys of the trainer that rollway starts (`keys/client`). Required with `keys`."""


class TransportConfig(Section, frozen=True):
    """How batches reach the trainer."""

    zmq: ZmqTransportConfig | None = None


class WatchConfig(Section, frozen=True):
    """When a process reports that its event loop was held."""

    stall_ms: Positive = 100.0
    """A callback that holds a loop longer than this is reported with its file and line."""


class PrometheusConfig(Section, frozen=True):
    """Serves `/metrics` to Prometheus while the run lasts."""

    port: Port
    """Port to serve at."""
    host: str = "127.0.0.1"
    """Address to bind; `0.0.0.0` lets other machines scrape."""


class MetricsConfig(Section, frozen=True):
    """Where metrics go besides `metrics.jsonl`."""

    wandb_project: str | None = None
    """Log every step to this W&B project: `project` or `team/project`. Needs `rollway[wandb]`."""
    tensorboard: bool = False
    """Write every step to `tensorboard/` of the run directory. Needs `rollway[tensorboard]`."""
    prometheus: PrometheusConfig | None = None


class RunConfig(Section, frozen=True, kw_only=True):
    """A whole run file."""

    name: Name
    """Name of the run, and of its directory in `output_dir`."""
    output_dir: str = "outputs"
    """Folder that holds all runs."""
    seed: Annotated[int, Meta(ge=0, lt=2**53)] = 0
    """Seed of the task order, of sampling and of the warm-up."""
    max_steps: Count = 100
    """Optimizer steps to train."""
    model: ModelConfig
    warmup: WarmupConfig | None = None
    env: Annotated[tuple[EnvConfig, ...], Meta(min_length=1)]
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    orchestrator: OrchestratorConfig = OrchestratorConfig()
    retries: RetriesConfig = RetriesConfig()
    difficulty: DifficultyConfig = DifficultyConfig()
    eval: EvalConfig | None = None
    filters: FiltersConfig = FiltersConfig()
    trainer: TrainerConfig | None = None
    external_trainer: ExternalTrainerConfig | None = None
    payload: PayloadConfig = PayloadConfig()
    transport: TransportConfig = TransportConfig()
    watch: WatchConfig = WatchConfig()
    metrics: MetricsConfig = MetricsConfig()
