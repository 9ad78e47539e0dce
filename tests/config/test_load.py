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
    assert config.env[0].rollout_deadline_s > 0, "deadlines are on by default"


def test_overrides_are_toml_values_or_bare_words() -> None:
    config = load(EXAMPLE, ["trainer.lr=1e-3", "name=other", "env.0.workers=3", "model.template.x=true"])
    assert (config.trainer.lr, config.name, config.env[0].workers) == (1e-3, "other", 3)
    assert config.model.template == {"enable_thinking": False, "x": True}


@pytest.mark.parametrize(
    ("section", "key", "value", "said"),
    [
        ("trainer", "learning_rate", 1, ["unknown key 'trainer.learning_rate'", "allowed: lr"]),
        ("trainer", "max_grad_nrom", 1, ["'trainer.max_grad_nrom'", "did you mean 'max_grad_norm'?"]),
        ("trainer", "lr", "fast", ["'trainer.lr' = 'fast'", "float"]),
        ("trainer", "lr", -1.0, ["'trainer.lr' = -1.0", "> 0"]),
        ("orchestrator", "group_size", 1, ["'orchestrator.group_size' = 1", ">= 2"]),
        ("engine", "port", 70000, ["'engine.port' = 70000", "<= 65535"]),
    ],
)
def test_wrong_keys_are_named(section: str, key: str, value: object, said: list[str]) -> None:
    tree = {**MINIMAL, section: {key: value}}
    with pytest.raises(ConfigError) as refused:
        check(tree, "run.toml")
    message = str(refused.value)
    assert message.startswith("run.toml: ")
    assert "\n" not in message
    for part in said:
        assert part in message


def test_wrong_keys_inside_lists_are_named() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'env.0.worker' .*did you mean 'workers'"):
        check({**MINIMAL, "env": [{"id": "x", "worker": 2}]}, "run.toml")
    with pytest.raises(ConfigError, match=r"'env.1.workers' = 0: .*>= 1"):
        check({**MINIMAL, "env": [{"id": "x"}, {"id": "y", "workers": 0}]}, "run.toml")


def test_missing_keys_are_named() -> None:
    with pytest.raises(ConfigError, match=r"missing key 'model.path'"):
        check({**MINIMAL, "model": {}}, "run.toml")
    with pytest.raises(ConfigError, match=r"missing key 'env'"):
        check({"name": "x", "model": {"path": "m"}}, "run.toml")


@pytest.mark.parametrize("override", ["trainer.lr", "=1", "env.7.workers=1", "name.x=1"])
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
    ("overrides", "said"),
    [
        ({"batch_size": 60, "group_size": 8}, "not a multiple"),
        ({"batch_size": 64, "group_size": 8, "max_in_flight": 4}, "no group could ever run"),
    ],
)
def test_the_plan_refuses_what_cannot_train(overrides: dict[str, int], said: str) -> None:
    config = check({**MINIMAL, "orchestrator": overrides}, "run.toml")
    config = msgspec.structs.replace(
        config, engine=msgspec.structs.replace(config.engine, max_context=4096)
    )
    with pytest.raises(ConfigError, match=said):
        plan(config)


def test_an_engine_of_messages_cannot_train() -> None:
    config = check({**MINIMAL, "engine": {"speaks": "messages"}}, "run.toml")
    with pytest.raises(ConfigError, match=r"'engine.speaks' = 'messages': .*no token ids.*rollway eval"):
        plan(config)


SERVED = {"id": "reverse-text", "address": "tcp://10.0.0.5:5555", "keys": "keys/client"}


def served(payload: str = "frames", **env: object) -> dict[str, object]:
    return {**MINIMAL, "env": [{**SERVED, **env}], "payload": {"store": payload}}


def test_a_run_may_point_at_a_server() -> None:
    planned = plan(check(served(), "run.toml"))
    assert planned.num_workers == planned.worker_slots == 0
    assert planned.binds == "orchestrator.batch_size × (1 + max_off_policy_steps)"
    plan(check(served("files", shares_payload=True), "run.toml"))
    plan(check(served(address="tcp://127.0.0.1:5555", keys=""), "run.toml"))
    plan(check(served(address="tcp://[::1]:5555", keys=""), "run.toml"))


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        (
            served(keys=""),
            r"'env.0.address' = .* on another machine.* set 'env.0.keys'; run 'rollway keys",
        ),
        (
            served("files"),
            r"'payload.store' = 'files', but .*--payload-dir outputs/run/payload.*shares_p",
        ),
        (served(address="10.0.0.5"), r"'env.0.address' = '10.0.0.5': expected tcp://HOST:PORT"),
        (served(args={"a": 1}), r"'env.0.args' = .* 'rollway serve --args'"),
        (served(address=""), r"'env.0.keys' is for a server at 'env.0.address', which is empty"),
        (served(address="", keys="", shares_payload=True), r"'env.0.shares_payload' is for a server"),
    ],
)
def test_what_a_served_environment_requires(tree: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan(check(tree, "run.toml"))


def test_one_engine_or_several() -> None:
    for url, urls in (("", ()), ("http://a:1", ("http://a:1",)), (["http://a:1", "http://b:1"], None)):
        config = check({**MINIMAL, "engine": {"url": url}}, "run.toml")
        assert config.engine.urls == (tuple(url) if urls is None else urls)
        assert plan(config).engine == (", ".join(config.engine.urls) or "embedded")
    twice = check({**MINIMAL, "engine": {"url": ["http://a:1", "http://a:1"]}}, "run.toml")
    with pytest.raises(ConfigError, match=r"'engine.url' = .* names an engine twice"):
        plan(twice)


def test_the_least_workers_are_no_more_than_the_most() -> None:
    config = check({**MINIMAL, "env": [{"id": "x", "workers": 2, "min_workers": 3}]}, "run.toml")
    with pytest.raises(ConfigError, match=r"'env.0.min_workers' = 3 is more than 'env.0.workers' = 2"):
        plan(config)


@pytest.mark.parametrize(
    ("transport", "external", "said"),
    [
        ({"payload": "frames"}, False, r"'transport.payload' is for 'transport.manifests' = 'zmq'"),
        ({"keys": "k"}, False, r"'transport.keys' is for 'transport.manifests' = 'zmq'"),
        (
            {"manifests": "zmq", "bind": "tcp://0.0.0.0:5599"},
            True,
            r"'transport.bind' = tcp://0.0.0.0:5599 lets other machines connect.* 'transport.keys' is "
            r"required; run 'rollway keys new keys'",
        ),
        ({"manifests": "zmq", "bind": "here"}, True, r"expected tcp://HOST:PORT"),
        ({"manifests": "zmq", "keys": "k"}, False, r"'transport.trainer_keys' is empty"),
        ({"manifests": "zmq", "trainer_keys": "k"}, False, r"'transport.keys' is empty"),
        ({"manifests": "zmq", "payload": "frames"}, True, r"'transport.payload' is for the trainer"),
        (
            {"manifests": "zmq", "keys": "k", "trainer_keys": "k"},
            True,
            r"'transport.trainer_keys' is for the trainer that is started here",
        ),
    ],
)
def test_what_a_transport_requires(transport: dict[str, str], external: bool, said: str) -> None:
    tree = {**MINIMAL, "transport": transport, "trainer": {"external": external}}
    with pytest.raises(ConfigError, match=said):
        plan(check(tree, "run.toml"))


def test_transports_that_can_be() -> None:
    for transport, external in (
        ({}, True),
        ({"manifests": "zmq", "payload": "frames"}, False),
        ({"manifests": "zmq", "keys": "k", "trainer_keys": "k"}, False),
        ({"manifests": "zmq", "bind": "tcp://0.0.0.0:5599", "keys": "k"}, True),
    ):
        plan(check({**MINIMAL, "transport": transport, "trainer": {"external": external}}, "run.toml"))
