"""Models by their name on the hub: downloaded once, with progress, and again from where it stopped."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.doubles.hub import Hub, hub_of

from rollway.errors import ModelError
from rollway.model.folder import hub_name_of
from rollway.model.hub import find_folder

FIND = (
    "import sys; from rollway.model.hub import find_folder; print(find_folder(sys.argv[1]))"
)
WEIGHTS_BYTES = 40 << 20


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(os.urandom(WEIGHTS_BYTES))
    (folder / "pytorch_model.bin").write_bytes(b"not wanted")
    return folder


class Machine:
    """A machine with an empty cache, on which processes look for models."""

    def __init__(self, cache: Path, endpoint: str) -> None:
        self.cache = cache
        self._env = {**os.environ, "HF_HOME": str(cache), "HF_ENDPOINT": endpoint}
        self._env.pop("HF_HUB_OFFLINE", None)

    def start(self, name: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-c", FIND, name], env=self._env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0,
        )  # fmt: skip

    def begun(self) -> list[Path]:
        """Return the files that are being downloaded."""
        return list(self.cache.rglob("*.incomplete"))

    def find(self, name: str) -> tuple[int, str, str]:
        with self.start(name) as process:
            out, err = process.communicate(timeout=300)
        return process.returncode, out.strip(), err


def test_a_model_is_downloaded_once_with_progress(tmp_path: Path, model: Path) -> None:
    with hub_of(model) as hub:
        machine = Machine(tmp_path / "cache", hub.url)
        code, found, shown = machine.find(Hub.NAME)
        assert code == 0, shown
        assert "%" in shown, "progress"
        files = {path.name: path.read_bytes() for path in Path(found).iterdir()}
        assert files.keys() == {"config.json", "tokenizer.json", "model.safetensors"}
        assert files["model.safetensors"] == (model / "model.safetensors").read_bytes()
        asked = len(hub.requests)
        code, again, _ = machine.find(Hub.NAME)
        assert (code, again) == (0, found)
        assert len(hub.requests) == asked, "the hub is asked only once"
    code, again, _ = machine.find(Hub.NAME)
    assert (code, again) == (0, found), "the hub is gone, and is not needed"
    assert hub_name_of(found) == Hub.NAME


def test_what_another_program_downloaded_in_part_is_completed(
    tmp_path: Path, model: Path
) -> None:
    with hub_of(model) as hub:
        machine = Machine(tmp_path / "cache", hub.url)
        _, found, _ = machine.find(Hub.NAME)
        Path(found, "model.safetensors").resolve().unlink()
        Path(found, "model.safetensors").unlink()
        for listing in machine.cache.rglob("trees"):
            shutil.rmtree(listing)
        code, again, shown = machine.find(Hub.NAME)
        assert (code, again) == (0, found), shown
    assert Path(found, "model.safetensors").stat().st_size == WEIGHTS_BYTES


def test_a_connection_that_breaks_is_an_error_of_one_line(
    tmp_path: Path, model: Path
) -> None:
    with hub_of(model) as hub:
        hub.breaks = True
        code, _, shown = Machine(tmp_path / "cache", hub.url).find(Hub.NAME)
    assert code == 1
    line = shown.splitlines()[-1]
    assert "it cannot be downloaded from the hub (" in line
    assert "start again to continue" in line
    assert "httpx" not in shown


def test_a_download_can_be_interrupted_and_started_again(tmp_path: Path, model: Path) -> None:
    with hub_of(model) as hub:
        hub.pause_s = 0.02
        machine = Machine(tmp_path / "cache", hub.url)
        with machine.start(Hub.NAME) as process:
            while hub.requests.count("model.safetensors") == 0 or not machine.begun():
                assert process.poll() is None
                time.sleep(0.01)
            os.killpg(process.pid, signal.SIGINT)
            process.communicate(timeout=300)
            assert process.returncode != 0
        assert not machine.begun(), "no half file stays behind"
        hub.pause_s = 0.0
        code, found, shown = machine.find(Hub.NAME)
        assert code == 0, shown
        assert hub.requests.count("model.safetensors") == 2
    weights = Path(found, "model.safetensors").read_bytes()
    assert weights == (model / "model.safetensors").read_bytes()


def test_a_name_that_the_hub_does_not_know(tmp_path: Path, model: Path) -> None:
    with hub_of(model) as hub:
        _, _, shown = Machine(tmp_path / "cache", hub.url).find("someone/other")
    assert "no model folder 'someone/other', and no model of this name on the hub" in shown


def test_without_network_the_error_asks_for_a_folder(tmp_path: Path) -> None:
    _, _, shown = Machine(tmp_path / "cache", "http://127.0.0.1:9").find("someone/tiny")
    assert "no model folder 'someone/tiny', and it cannot be downloaded from the hub" in shown
    assert "copy the model's files to a folder of this machine and give that folder" in shown


def test_what_cannot_be_a_name_is_a_folder_that_does_not_exist() -> None:
    for path in ("./models/tiny", "/models/tiny", "tiny", "a/b/c"):
        with pytest.raises(ModelError, match=f"no model folder '{path}'"):
            find_folder(path)


def test_code_that_comes_with_a_model_runs_only_if_allowed(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "strange", "auto_map": {"AutoConfig": "code.Config"}}')
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(
        ModelError, match=r"family 'strange'.*set model\.trust_remote_code = true"
    ):
        find_folder(str(tmp_path))
    assert find_folder(str(tmp_path), trusts_code=True) == str(tmp_path)
    config.write_text('{"model_type": "qwen3", "auto_map": {"AutoConfig": "code.Config"}}')
    assert find_folder(str(tmp_path)) == str(tmp_path), "transformers knows the family itself"
