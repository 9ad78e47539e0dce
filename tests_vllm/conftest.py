from collections.abc import Iterator
from pathlib import Path

import pytest

from tests_vllm.models import write_model
from tests_vllm.servers import RIGHT, ROUTES, Server, serving


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session")
def moe(folder: Path) -> Path:
    return write_model(folder / "moe")


@pytest.fixture(scope="session")
def dense(folder: Path) -> Path:
    return write_model(folder / "dense", experts=0)


@pytest.fixture(scope="session")
def tied(folder: Path) -> Path:
    return write_model(folder / "tied", experts=0, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def right_moe(folder: Path, moe: Path) -> Iterator[Server]:
    """A server with all the right flags."""
    with serving(moe, folder / "right_moe.log", *RIGHT, *ROUTES) as server:
        yield server
