"""What tests share: an event loop, the command line, and tiny models that are built once."""

import signal
from pathlib import Path

import pytest
from hypothesis import settings

from rollway.config.sections import ENGINE_KEY_VAR
from tests.doubles.command import Rollway, command
from tests.doubles.shared import build_once

settings.register_profile("rollway", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("rollway")

signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # a shell's background job ignores it


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def no_engine_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that ran in this process may have left the key of its engine."""
    monkeypatch.delenv(ENGINE_KEY_VAR, raising=False)


@pytest.fixture
def rollway(capsys: pytest.CaptureFixture[str]) -> Rollway:
    return command(capsys)


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixture-of-Experts with random weights, and its tokenizer."""
    return build_once(tmp_path_factory, "tiny-moe", build_tiny_moe)


@pytest.fixture(scope="session")
def tiny_dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without experts, with random weights, and its tokenizer."""
    return build_once(tmp_path_factory, "tiny-dense", build_tiny_dense)


def build_tiny_dense(folder: Path) -> None:
    build_tiny(folder, num_experts=0)


def build_tiny_moe(folder: Path) -> None:
    build_tiny(folder, num_experts=8)


def build_tiny(folder: Path, num_experts: int) -> None:
    import torch

    from rollway.inference.rendering.tokenizer import Tokenizer
    from rollway.model.load import save_weights
    from rollway.model.tiny import TinyShape, tiny_model, write_tokenizer

    torch.manual_seed(0)
    vocab_size = write_tokenizer(folder)
    eos_id = Tokenizer(str(folder)).convert_tokens_to_ids("<|im_end|>")
    shape = TinyShape(hidden_size=64, num_layers=3, num_experts=num_experts)
    model = tiny_model(shape, vocab_size, eos_id, max_context=256)
    for name, weight in model.named_parameters():  # experts that differ, routers near a tie
        if weight.dim() > 1:
            std = 0.02 if "gate.weight" in name else 0.3 if "experts" in name else 0.09
            torch.nn.init.normal_(weight, std=std)
    save_weights(model, folder)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mix files that start whole systems evenly with the others: each of several processes gets a part
    of the list, and all should have the same work."""
    slow: dict[Path, bool] = {}
    for item in items:
        slow[item.path] = slow.get(item.path, False) or bool(
            item.get_closest_marker("system")
        )
    place: dict[Path, float] = {}
    for kind in (True, False):
        paths = [path for path, is_slow in slow.items() if is_slow == kind]
        place |= {path: number / len(paths) for number, path in enumerate(paths)}
    items.sort(key=lambda item: place[item.path])
