"""The sections of a run file. Every key, its range, its default and its meaning stand here."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from .address import ANY_LOOPBACK_PORT

Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of a run file; unknown keys are refused."""


class ModelConfig(Section, frozen=True, kw_only=True):
    """Which weights to start from and how messages become tokens."""

    path: str
    """Folder with config.json, weights and tokenizer.json."""
    renderer: str = "auto"
    """Message renderer of the model family (`qwen3`, `glm5`, …), `default` for its chat template."""
    template: dict[str, Any] = field(default_factory=dict)
    """Options of the renderer, such as `enable_thinking`."""


class WarmupConfig(Section, frozen=True, kw_only=True):
    """Builds a tiny Mixture-of-Experts at `model.path`, taught by an environment's answers."""

    solve_rate: Fraction = 0.2
    """Stop when the mean probability of a right answer reaches this."""
    max_steps: Count = 600
    """Stop after so many steps in any case."""
    batch_size: Count = 64
    """Answers of one step."""
    lr: Positive = 2e-3
    """Learning rate."""
    hidden_size: Count = 128
    """Width of the model."""
    num_layers: Count = 2
    """Its layers."""
    num_experts: Annotated[int, Meta(ge=2)] = 8
    """Experts of each layer."""
    topk: Count = 2
    """Experts that a token goes through."""


class EnvConfig(Section, frozen=True, kw_only=True):
    """One environment and the server that runs it."""

    id: str
    """Registered name, `package.module`, or `path/to/file.py`."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of its `load_environment`."""
    ratio: Positive = 1.0
    """Share of the groups, relative to the other environments."""
    workers: Count = 2
    """Worker processes, at most."""
    min_workers: Natural = 0
    """Worker processes at least: more start while work waits, and end when idle; 0 keeps all."""
    idle_s: Positive = 60.0
    """A worker beyond `min_workers` that runs nothing for so long is ended."""
    concurrency: Count = 64
    """Rollouts at a time in one worker."""
    max_waiting: Count = 20_000
    """Rollouts of one client that may wait for a worker; more fail at once."""
    lease_s: Annotated[float, Meta(ge=2)] = 10.0
    """A worker not heard of for so long is killed: what held its loop fails, the rest moves."""
    client_lease_s: Annotated[float, Meta(ge=5)] = 30.0
    """The rollouts of a client not heard of for so long are cancelled."""
    drain_s: Positive = 30.0
    """How long rollouts may go on once the server is told to end (SIGTERM)."""
    rollout_deadline_s: Positive = 300.0
    """A rollout that runs longer fails with boundary `deadline`."""
    scoring_processes: Count = 1
    """Processes of one worker that run plain rewards, one rollout at a time each."""
    scoring_deadline_s: Positive = 60.0
    """A reward that runs longer is killed and fails its rollout."""
    tool_deadline_s: Positive = 60.0
    """A tool that runs longer is ended; its toolset says what that means for the rollout."""
    plain_processes: Count = 8
    """Processes of one worker for plain (not async) rollouts, updates and tools, one at a time each."""
    address: str = ""
    """Address of a server that `rollway serve` runs (`tcp://host:port`); empty starts one. Of the other
    keys only `id`, `ratio`, `keys` and `shares_payload` are for such a server."""
    keys: str = ""
    """Folder with this client's keys (`rollway keys new` makes them); a server on another machine
    requires them."""
    shares_payload: bool = False
    """The server at `address` writes into this run's `payload/` (`rollway serve --payload files
    --payload-dir …`). Without it `payload.store` must be `frames`."""
    scoring_memory_mb: Count = 4096
    """Memory a scoring process may take beyond what it has once the environment is loaded."""


class SamplingConfig(Section, frozen=True, kw_only=True):
    """How the engine draws training rollouts."""

    max_tokens: Count = 1024
    """Tokens of one turn."""
    temperature: Positive = 1.0
    """Logits are divided by it, in the engine and in the trainer."""


class EngineConfig(Section, frozen=True, kw_only=True):
    """The inference engine: embedded, or the addresses of some that run already."""

    url: str | tuple[str, ...] = ""
    """Address of a running vLLM or SGLang, or a list of several that serve the same model; empty starts
    the embedded engine."""
    speaks: Literal["tokens", "messages"] = "tokens"
    """`tokens`: ids in, ids and logprobs out, which training needs. `messages`: any OpenAI-compatible
    chat endpoint; its rollouts have no rows, so only `rollway eval` can use it."""
    model: str = ""
    """Name of the model at `url`; empty takes the first it lists."""
    key_var: str = ""
    """Environment variable that holds the key for `url`; empty sends none."""
    port: Port = 0
    """Port of the embedded engine; 0 takes a free one."""
    max_batch: Count = 128
    """Requests the embedded engine decodes at a time."""
    max_context: Count = 4096
    """Tokens of prompt and reply together."""
    threads: Count = 1
    """Torch threads of the embedded engine."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the embedded engine computes in; the trainer computes in float32."""
    request_deadline_s: Positive = 120.0
    """A reply that takes longer fails its rollout with boundary `engine`."""
    patience_s: Positive = 180.0
    """How long rollouts wait when no engine answers, before the run stops with the reason."""
    routes: bool = True
    """Ask for expert choices and replay them in the trainer; needs a Mixture-of-Experts."""

    @property
    def urls(self) -> tuple[str, ...]:
        """All addresses; none for the embedded engine."""
        return self.url if isinstance(self.url, tuple) else (self.url,) * bool(self.url)


class OrchestratorConfig(Section, frozen=True, kw_only=True):
    """What runs, what trains and what is thrown away."""

    batch_size: Count = 64
    """Rollouts of one optimizer step."""
    batch_tokens: Natural = 0
    """Tokens of one optimizer step, prompts included; a batch is shipped once it has as many, whatever
    the number of rollouts. 0 counts rollouts; `batch_size` is then only where the estimate starts."""
    group_size: Annotated[int, Meta(ge=2)] = 8
    """Rollouts of one task."""
    max_off_policy_steps: Natural = 1
    """How many versions older than the trained weights a rollout may be; 0 is synchronous."""
    max_in_flight: Count = 256
    """Rollouts running at a time."""
    adapt_in_flight: bool = False
    """Run fewer than `max_in_flight` while the engine says that more requests wait than run or that its
    cache is nearly full, or while workers' loops are late; more again when there is room."""
    rollouts_a_minute: NonNegative = 0.0
    """Rollouts started a minute, at most, for tools and judges that are limited; 0 sets no limit."""
    stragglers_after: Fraction = 1.0
    """Once this share of a group has settled, the rest of it has `stragglers_wait_s` left and is
    cancelled then; the group trains without. It favours short rollouts. 1 waits for all."""
    stragglers_wait_s: NonNegative = 30.0
    """How long the rest of such a group may go on."""
    max_quiet_s: Positive = 3600.0
    """If for so long no rollout settles, no version is published and no weights are loaded, the run
    stops and says what it waited for."""
    env_patience_s: Positive = 120.0
    """An environment none of whose rollouts settles for so long gets no more of them until one does, and
    the others train without it."""
    max_fruitless_groups: Count = 500
    """Groups in a row that give nothing to train on before the run stops as stuck."""
    advantage: Annotated[str, Meta(min_length=1)] = "grpo"
    """`grpo` (a reward above its group's mean), `rloo` (above the mean of the others), `grpo_std` and
    `grpo_max` (grpo divided by the group's standard deviation, by its largest deviation), or a function
    of your own: `path/to/file.py:function` or `package.module:function`."""
    advantage_deadline_s: Positive = 30.0
    """A function of your own that takes longer for one group ends the run."""
    length_penalty: NonNegative = 0.0
    """Reward taken off the longest right answer of a group, nothing off the shortest."""
    length_penalty_by: Literal["tokens", "turns"] = "tokens"
    """What makes an answer long."""
    correct_at: float = 1.0
    """From which reward on an answer is right."""
    save_rollouts: bool = True
    """Write every settled rollout to `rollouts/step_N/train.jsonl`."""
    keep_weights: Annotated[int, Meta(ge=1)] = 2
    """How many versions stay on disk once the engine has newer ones."""


class RetriesConfig(Section, frozen=True, kw_only=True):
    """How often a rollout that failed runs again, by the boundary at which it did. Environments that
    run groups as one are left out."""

    env: Natural = 0
    """Failed in the environment's own code."""
    engine: Natural = 2
    """Failed because the engine refused, or answered nonsense or nothing."""
    scorer: Natural = 0
    """Failed in a reward."""
    deadline: Natural = 0
    """Took longer than it may."""
    worker: Natural = 1
    """Lost with its worker, more than once."""
    budget: Fraction = 0.1
    """Retries of all rollouts started, at most: where everything fails, trying all of it again only
    adds load."""


class DifficultyConfig(Section, frozen=True, kw_only=True):
    """Tasks that are always solved, or never, teach little: they get a pool of their own and come up
    seldom. One group that goes otherwise brings a task back."""

    easy_at: float | None = None
    """A task whose group has a mean reward of at least this is easy; without it none is."""
    hard_at: float | None = None
    """A task whose group has a mean reward of at most this is hard; without it none is."""
    easy_share: Fraction = 0.05
    """Groups of easy tasks, of all groups."""
    hard_share: Fraction = 0.1
    """Groups of hard tasks, of all groups."""


class EvalConfig(Section, frozen=True, kw_only=True):
    """Evaluations between the steps, on the environments' split `eval`. They never train."""

    every: Natural = 0
    """Steps from one evaluation to the next; the last version is evaluated too. 0 evaluates none."""
    at_start: bool = True
    """Evaluate the model before its first step as well."""
    num_tasks: Count = 64
    """Tasks of each environment."""
    num_rollouts: Count = 4
    """Rollouts of each task."""
    share: Annotated[float, Meta(gt=0, le=1)] = 0.25
    """Of the rollouts that run at a time, at most this part is evaluation."""
    envs: tuple[str, ...] = ()
    """Ids of the environments; all if empty."""
    temperature: Positive = 1.0
    """How the engine draws evaluated rollouts."""
    max_tokens: Natural = 0
    """Tokens of one turn; 0 takes `sampling.max_tokens`."""


class FiltersConfig(Section, frozen=True, kw_only=True):
    """What keeps rollouts from training: `monitor` counts it, `enforce` also leaves them out."""

    zero_advantage: Literal["monitor", "enforce"] = "enforce"
    """Groups whose rollouts all have the same reward."""
    gibberish: Literal["monitor", "enforce"] = "monitor"
    """Rollouts with a rare token where it was very unlikely."""
    gibberish_rare_from: Natural = 100_000
    """Token ids from here on are rare: vocabularies are sorted by how often merges occur."""
    gibberish_logprob: float = -14.0
    """A log-probability below this is very unlikely."""
    repetition: Literal["monitor", "enforce"] = "monitor"
    """Rollouts that go round in circles: many tokens in a row, each almost certain."""
    repetition_tokens: Count = 3000
    """How many tokens in a row."""
    repetition_probability: Fraction = 0.99
    """How certain each of them."""


class TrainerConfig(Section, frozen=True, kw_only=True):
    """The optimizer step."""

    lr: Positive = 1e-3
    """Learning rate of AdamW."""
    lr_ramp_steps: Natural = 0
    """Steps over which the learning rate rises to `lr`."""
    weight_decay: NonNegative = 0.0
    """Weight decay of AdamW."""
    max_grad_norm: Positive = 1.0
    """A gradient with a greater norm is scaled down to it."""
    clip_low: Fraction = 0.2
    """Importance ratios below `1 - clip_low` give no gradient where that would move further away."""
    clip_high: NonNegative = 0.28
    """The same above `1 + clip_high`."""
    micro_batch_tokens: Count = 4096
    """Tokens packed into one forward pass; a longer row gets a pass of its own."""
    replay_routes: bool = True
    """Use the engine's expert choices in the Mixture-of-Experts layers."""
    threads: Count = 1
    """Torch threads of each rank."""
    checkpoint_every: Natural = 10
    """Steps between checkpoints, for `--resume`; 0 writes none but the last."""
    keep_checkpoints: Count = 3
    """How many checkpoints stay on disk."""
    ranks: Count = 1
    """Processes that train together, each its part of every batch."""
    external: bool = False
    """Start no trainer: one of your own takes the batches (`rollway.transport`). Of the other keys only
    `ranks` and `micro_batch_tokens` are for such a trainer."""


class PayloadConfig(Section, frozen=True, kw_only=True):
    """Where columns lie on their way to the trainer."""

    store: Literal["files", "frames"] = "files"
    """`files`: workers write into the run directory. `frames`: they share no file system with it; the
    columns travel with the rollout's record, and the orchestrator writes them there."""
    durability: Literal["process", "host"] = "process"
    """What committed columns outlive: `process` the death of whoever wrote them, `host` also a loss of
    power (each commit waits for the disk)."""
    segment_mb: Count = 64
    """A new segment file starts at this size."""
    frames_mb: Count = 64
    """With `frames`: bytes of one worker on their way, at most; further rollouts wait to commit."""
    budget_mb: Count = 16_384
    """Payload written and not yet trained, at most; dispatching slows down before it."""


class TransportConfig(Section, frozen=True, kw_only=True):
    """How batches come to the trainer, and word of its versions back."""

    manifests: Literal["files", "zmq"] = "files"
    """`files`: through the run directory, which the trainer must see. `zmq`: through a socket, on which
    every batch is kept until its version is published, and sent again to a trainer that restarts."""
    payload: Literal["files", "frames"] = "files"
    """With `zmq`: whether the trainer maps the segments in the run directory, or is sent their bytes and
    keeps them in a folder of its own. A trainer of your own says so when it connects."""
    bind: str = ANY_LOOPBACK_PORT
    """With `zmq`: where the orchestrator waits for the trainer; `*` takes a free port."""
    keys: str = ""
    """Folder with the orchestrator's keys (`keys/server` of `rollway keys new keys`); required where
    `bind` lets other machines connect."""
    trainer_keys: str = ""
    """Folder with the keys of the trainer that is started here (`keys/client`); needed with `keys`."""
    frames_mb: Count = 64
    """With `frames`: bytes on their way to the trainer, at most."""


class WatchConfig(Section, frozen=True, kw_only=True):
    """When a process says that its loop was late."""

    stall_ms: Positive = 100.0
    """A callback that holds a loop longer is reported with its file:line."""
    tick_ms: Annotated[float, Meta(ge=1, le=100)] = 10.0
    """How often lateness is sampled."""
    warn_p90_ms: NonNegative = 20.0
    """A second in which the lag's p90 was higher is warned about, with the culprit; 0 never is."""
    warn_p99_ms: NonNegative = 50.0
    """The same for the p99."""
    warn_max_ms: NonNegative = 250.0
    """The same for the greatest lag."""


class MetricsConfig(Section, frozen=True, kw_only=True):
    """Where metrics go, besides `metrics.jsonl`."""

    prometheus_port: Port = 0
    """Serve `/metrics` to Prometheus at this port while the run lasts; 0 serves nothing."""
    prometheus_host: str = "127.0.0.1"
    """Address the port is bound to; `0.0.0.0` lets other machines scrape."""
    wandb_project: str = ""
    """Log every step to this project of Weights & Biases, `project` or `team/project`; empty does not.
    Needs `rollway[wandb]`."""
    tensorboard: bool = False
    """Write every step to event files in `tensorboard/` of the run directory. Needs
    `rollway[tensorboard]`."""


class SimulateConfig(Section, frozen=True, kw_only=True):
    """Mean durations for `rollway simulate`, where there is no past run to take them from."""

    turns: Positive = 1.0
    """Turns of a rollout."""
    turn_s: Positive = 5.0
    """The engine's time for one turn."""
    tool_s: NonNegative = 0.0
    """The environment's time between two turns."""
    scoring_s: NonNegative = 0.1
    """The rewards' time."""
    train_s: Positive = 30.0
    """From a batch being shipped to its weights being published."""
    update_s: NonNegative = 2.0
    """The engine's loading of weights."""
    spread: NonNegative = 0.5
    """Of all durations: the standard deviation of their logarithm."""
    rollout_bytes: Natural = 1_000_000
    """Payload of a rollout."""
    rollout_tokens: Count = 1000
    """Tokens of a rollout, prompts included."""
    fails: Fraction = 0.0
    """Rollouts that fail."""


class RunConfig(Section, frozen=True, kw_only=True):
    """A whole run file."""

    name: Name
    """Name of the run: its directory below `output_dir`."""
    output_dir: str = "outputs"
    """Folder of all runs."""
    seed: Natural = 0
    """Seed of task order, sampling and warm-up."""
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
    eval: EvalConfig = EvalConfig()
    filters: FiltersConfig = FiltersConfig()
    trainer: TrainerConfig = TrainerConfig()
    payload: PayloadConfig = PayloadConfig()
    transport: TransportConfig = TransportConfig()
    watch: WatchConfig = WatchConfig()
    metrics: MetricsConfig = MetricsConfig()
    simulate: SimulateConfig = SimulateConfig()
