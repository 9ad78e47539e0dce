"""Run files: what is accepted, and how what is not is refused."""

from pathlib import Path

import msgspec
import pytest

from rollway.config.load import check, load
from rollway.config.plan import plan
from rollway.errors import ConfigError

MINIMAL = {"name": "run", "model": {"path": "m"}, "env": [{"id": "reverse-text"}]}
EXAMPLE = Path(__file__).parents[2] / "examples" / "reverse-text" / "run.toml"


def test_a_minimal_file_gets_defaults() -> None:
    config = check(MINIMAL, "run.toml")
    assert config.orchestrator.batch_size == 64
    assert config.env[0].local.rollout_deadline_s > 0, "deadlines are on by default"


def test_overrides_are_toml_values_or_bare_words() -> None:
    config = load(
        EXAMPLE,
        ["trainer.lr=1e-3", "name=other", "env.0.server.workers=3", "model.template.x=true"],
    )
    assert (
        config.trainer and config.trainer.lr,
        config.name,
        config.env[0].local.workers,
    ) == (
        1e-3,
        "other",
        3,
    )
    assert config.model.template == {"enable_thinking": False, "x": True}


@pytest.mark.parametrize(
    ("section", "key", "value", "texts"),
    [
        (
            "trainer",
            "learning_rate",
            1,
            ["unknown key 'trainer.learning_rate'", "allowed: lr"],
        ),
        (
            "trainer",
            "max_grad_nrom",
            1,
            ["'trainer.max_grad_nrom'", "did you mean 'max_grad_norm'?"],
        ),
        ("trainer", "lr", "fast", ["'trainer.lr' = 'fast'", "a number"]),
        ("trainer", "lr", -1.0, ["'trainer.lr' = -1.0", "above 0"]),
        ("orchestrator", "group_size", 1, ["'orchestrator.group_size' = 1", "at least 2"]),
        (
            "metrics",
            "prometheus",
            {"port": 70000},
            ["'metrics.prometheus.port' = 70000", "at most 65535"],
        ),
    ],
)
def test_wrong_keys_are_named(
    section: str, key: str, value: object, texts: list[str]
) -> None:
    tree = {**MINIMAL, section: {key: value}}
    with pytest.raises(ConfigError) as refused:
        check(tree, "run.toml")
    message = str(refused.value)
    assert message.startswith("run.toml: ")
    assert "\n" not in message
    for text in texts:
        assert text in message


def test_wrong_keys_inside_lists_are_named() -> None:
    misspelt = {**MINIMAL, "env": [{"id": "x", "server": {"worker": 2}}]}
    with pytest.raises(
        ConfigError, match=r"unknown key 'env.0.server.worker' .*did you mean 'workers'"
    ):
        check(misspelt, "run.toml")
    too_few = {**MINIMAL, "env": [{"id": "x"}, {"id": "y", "server": {"workers": 0}}]}
    with pytest.raises(ConfigError, match=r"'env.1.server.workers' = 0: .*at least 1"):
        check(too_few, "run.toml")


@pytest.mark.parametrize(
    ("tree", "hint"),
    [
        ({"env": [{"id": "x", "workers": 2}]}, "did you mean 'env.0.server.workers'?"),
        ({"engine": {"url": "http://a:1"}}, "did you mean 'engine.external.url'?"),
        ({"engine": {"max_batch": 2}}, "did you mean 'engine.embedded.max_batch'?"),
        ({"transport": {"bind": "x"}}, "did you mean 'transport.zmq.bind'?"),
    ],
)
def test_a_key_of_a_deeper_section_is_found(tree: dict[str, object], hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check({**MINIMAL, **tree}, "run.toml")
    assert hint in str(refused.value)


@pytest.mark.parametrize(
    ("tree", "keys"),
    [
        ({"trainer": {}, "external_trainer": {}}, "'trainer' and 'external_trainer'"),
        (
            {"engine": {"embedded": {}, "external": {"url": "http://a:1"}}},
            "'engine.embedded' and 'engine.external'",
        ),
    ],
)
def test_a_part_is_started_or_external_but_not_both(
    tree: dict[str, object], keys: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check({**MINIMAL, **tree}, "run.toml")
    assert f"the run has both {keys}" in str(refused.value)


def test_an_override_chooses_the_variant() -> None:
    config = load(EXAMPLE, ["engine.external.url=http://a:1", "external_trainer={}"])
    assert (config.engine.embedded, config.trainer) == (None, None)
    external = "env.0.external.address=tcp://127.0.0.1:1"
    config = load(EXAMPLE, [external])
    assert config.env[0].external is not None
    assert config.env[0].server is not None, (
        "it says how 'rollway serve' runs the environment"
    )
    config = load(EXAMPLE, [external, "env.0.server.workers=3"])
    assert config.env[0].external is not None, "a key of one does not remove the other"


@pytest.mark.parametrize("word", ["nan", "inf", "-inf"])
def test_a_word_that_toml_takes_for_a_number_stays_a_word_in_free_sections(word: str) -> None:
    config = load(EXAMPLE, [f"env.0.args.how={word}", f"model.template.how={word}"])
    assert config.env[0].args["how"] == config.model.template["how"] == word
    assert load(EXAMPLE, ["trainer.max_grad_norm=inf"]).trainer is not None


def test_the_variant_that_a_run_starts_is_named() -> None:
    config = check(MINIMAL, "run.toml")
    assert config.trainer is not None
    assert config.engine.embedded is not None
    assert config.env[0].server is not None
    external = {
        "external_trainer": {"ranks": 2},
        "engine": {"external": {"url": "http://a:1"}},
    }
    config = check({**MINIMAL, **external}, "run.toml")
    assert config.trainer is None
    assert config.engine.embedded is None


def test_missing_keys_are_named() -> None:
    with pytest.raises(ConfigError, match=r"missing key 'model.path'"):
        check({**MINIMAL, "model": {}}, "run.toml")
    with pytest.raises(ConfigError, match=r"missing key 'env'"):
        check({"name": "x", "model": {"path": "m"}}, "run.toml")


@pytest.mark.parametrize("override", ["trainer.lr", "=1", "env.7.ratio=1", "name.x=1"])
def test_bad_overrides_are_refused(override: str) -> None:
    with pytest.raises(ConfigError):
        load(EXAMPLE, [override])


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run file"):
        load(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("name = ")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(broken)


def test_the_plan_says_what_binds() -> None:
    planned = plan(load(EXAMPLE))
    assert planned.groups_per_batch * 8 == 128
    assert planned.max_outstanding == 256


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"batch_size": 60, "group_size": 8}, "not a multiple"),
        (
            {"batch_size": 64, "group_size": 8, "max_in_flight": 4},
            "the rollouts of one task could never run",
        ),
    ],
)
def test_the_plan_refuses_what_cannot_train(overrides: dict[str, int], message: str) -> None:
    config = check({**MINIMAL, "orchestrator": overrides}, "run.toml")
    config = msgspec.structs.replace(
        config, engine=msgspec.structs.replace(config.engine, max_context=4096)
    )
    with pytest.raises(ConfigError, match=message):
        plan(config)


SERVER = {"address": "tcp://10.0.0.5:5555", "keys": "keys/client"}


def served(
    payload: str = "frames", args: object = None, **server: object
) -> dict[str, object]:
    external = {
        key: value for key, value in {**SERVER, **server}.items() if value is not None
    }
    env = {"id": "reverse-text", "args": args or {}, "external": external}
    return {**MINIMAL, "env": [env], "payload": {"store": payload}}


def test_a_run_may_use_an_external_server() -> None:
    planned = plan(check(served(), "run.toml"))
    assert planned.num_workers == planned.worker_slots == 0
    assert planned.binds == "orchestrator.batch_size × (1 + max_off_policy_steps)"
    plan(check(served("files", shares_payload=True), "run.toml"))
    plan(check(served(address="ipc:///tmp/serve/shop/socket", keys=None), "run.toml"))
    plan(check(served(address="tcp://[::1]:5555"), "run.toml"))


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            served(keys=None),
            r"'env.0.external.address' = .* is a port, .* set 'env.0.external.keys'; run",
        ),
        (
            served(address="tcp://127.0.0.1:5555", keys=None),
            r"'env.0.external.address' = .* is a port, .* set 'env.0.external.keys'; run",
        ),
        (
            served(address="ipc:///" + "x" * 120, keys=None),
            r"the path of a unix socket has at most 100 bytes",
        ),
        (
            served("files"),
            r"'payload.store' = 'files', but .*--payload-dir outputs/run/payload.*shares_payload",
        ),
        (
            served(address="10.0.0.5"),
            r"'env.0.external.address' = '10.0.0.5': expected tcp://HOST:PORT",
        ),
    ],
)
def test_what_an_external_server_requires(tree: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(check(tree, "run.toml"))


def test_one_engine_or_several() -> None:
    assert plan(check(MINIMAL, "run.toml")).engine == "embedded"
    for url, urls in (("http://a:1", ("http://a:1",)), (["http://a:1", "http://b:1"], None)):
        config = check({**MINIMAL, "engine": {"external": {"url": url}}}, "run.toml")
        assert config.engine.urls == (tuple(url) if urls is None else urls)
        assert plan(config).engine == ", ".join(config.engine.urls)
    twice = {"external": {"url": ["http://a:1", "http://a:1"]}}
    with pytest.raises(
        ConfigError, match=r"'engine.external.url' = .* names an engine twice"
    ):
        plan(check({**MINIMAL, "engine": twice}, "run.toml"))


def test_the_smallest_number_of_workers_is_not_above_the_largest() -> None:
    server = {"workers": 2, "min_workers": 3}
    config = check({**MINIMAL, "env": [{"id": "x", "server": server}]}, "run.toml")
    with pytest.raises(
        ConfigError, match=r"'env.0.server.min_workers' = 3 is more than .*workers' = 2"
    ):
        plan(config)


def test_evaluations_must_fit_and_name_environments_of_the_run() -> None:
    with pytest.raises(ConfigError, match=r"missing key 'eval.every'"):
        check({**MINIMAL, "eval": {}}, "run.toml")
    many = check({**MINIMAL, "eval": {"every": 1, "num_rollouts": 300}}, "run.toml")
    with pytest.raises(
        ConfigError, match=r"'eval.num_rollouts' = 300 is more than .*max_in_flight' = 256"
    ):
        plan(many)
    strange = check({**MINIMAL, "eval": {"every": 1, "envs": ["other"]}}, "run.toml")
    with pytest.raises(
        ConfigError, match=r"'eval.envs' names 'other', but .* \['reverse-text'\]"
    ):
        plan(strange)


EXTERNAL = {"external_trainer": {}}


@pytest.mark.parametrize(
    ("zmq", "trainer", "message"),
    [
        (
            {"bind": "tcp://0.0.0.0:5599"},
            EXTERNAL,
            r"'transport.zmq.bind' = tcp://0.0.0.0:5599 lets others connect.* "
            r"'transport.zmq.keys' is required; run 'rollway keys new keys'",
        ),
        ({"bind": "here"}, EXTERNAL, r"expected tcp://HOST:PORT"),
        ({"keys": "k"}, {}, r"'transport.zmq.trainer_keys' is missing"),
        ({"trainer_keys": "k"}, {}, r"'transport.zmq.keys' is missing"),
        (
            {"payload": "frames"},
            EXTERNAL,
            r"'transport.zmq.payload' are for the trainer that rollway starts",
        ),
        (
            {"keys": "k", "trainer_keys": "k"},
            EXTERNAL,
            r"'transport.zmq.trainer_keys' and .* are for the",
        ),
    ],
)
def test_what_a_socket_to_the_trainer_requires(
    zmq: dict[str, str], trainer: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(check({**MINIMAL, "transport": {"zmq": zmq}, **trainer}, "run.toml"))


def test_transports_that_are_accepted() -> None:
    for transport, trainer in (
        ({}, EXTERNAL),
        ({"zmq": {"payload": "frames"}}, {}),
        ({"zmq": {"keys": "k", "trainer_keys": "k"}}, {}),
        ({"zmq": {"bind": "tcp://0.0.0.0:5599", "keys": "k"}}, EXTERNAL),
    ):
        config = check({**MINIMAL, "transport": transport, **trainer}, "run.toml")
        assert plan(config).run_dir == "outputs/run"
