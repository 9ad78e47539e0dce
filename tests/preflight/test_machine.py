"""What a machine must offer before a run starts."""

import socket
from pathlib import Path

import pytest

from rollway.config.sections import EngineConfig, ExternalEngineConfig
from rollway.errors import ConfigError, ModelError, PortError, RunDirError
from rollway.model.folder import INDEX, check_weights
from rollway.preflight.machine import (
    check_bind_port,
    check_engine_key,
    check_engines,
    check_room_on_disk,
    check_urls,
)


def test_a_disk_must_have_room_for_weights_and_state(tmp_path: Path) -> None:
    run = tmp_path / "outputs" / "run"
    check_room_on_disk(run, 0, trains=False)
    with pytest.raises(
        RunDirError, match=r"needs at least \d+ MB for weights, the trainer's state"
    ):
        check_room_on_disk(run, 1 << 50, trains=True)
    check_room_on_disk(run, 1 << 50, trains=False)
    assert not run.parent.exists(), "looking makes no folder"


def test_a_port_is_free_again_after_it_was_checked() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortError, match=f"'--bind' = {port} cannot be bound"):
            check_bind_port("--bind", f"tcp://127.0.0.1:{port}")
        check_engines((f"http://127.0.0.1:{port}",))
    for _ in range(2):
        check_bind_port("--bind", f"tcp://127.0.0.1:{port}")
    check_bind_port("--bind", "tcp://127.0.0.1:*")
    with pytest.raises(ConfigError, match=f"nothing listens at http://127.0.0.1:{port} "):
        check_engines((f"http://127.0.0.1:{port}",))


def test_a_key_must_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EngineConfig(external=ExternalEngineConfig(url="http://a:1", key_var="SHOP_KEY"))
    monkeypatch.delenv("SHOP_KEY", raising=False)
    with pytest.raises(ConfigError, match="variable SHOP_KEY is not set: export it"):
        check_engine_key(engine)
    monkeypatch.setenv("SHOP_KEY", "sesame")
    check_engine_key(engine)


@pytest.mark.parametrize("url", ["localhost:8000", "tcp://a:1", "http://", "8000"])
def test_an_address_must_be_one_of_http(url: str) -> None:
    with pytest.raises(ConfigError, match="expected http://HOST:PORT"):
        check_urls((url,), "--engine-url")


def test_weights_must_be_whole(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no weights"):
        check_weights(str(tmp_path))
    (tmp_path / "a.safetensors").write_bytes(b"12345")
    assert check_weights(str(tmp_path)) == 5
    (tmp_path / INDEX).write_text(
        '{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}'
    )
    with pytest.raises(ModelError, match=r"lacks 1 of 2 files .* such as b.safetensors"):
        check_weights(str(tmp_path))
    (tmp_path / "b.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"b\.safetensors is empty"):
        check_weights(str(tmp_path))
