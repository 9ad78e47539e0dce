"""The model that tests pretend to have: a tokenizer of bytes and a renderer, but no weights."""

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from ..config.sections import ModelConfig
from ..inference.rendering.rendering import SyncRenderer
from ..inference.rendering.tokenizer import Tokenizer
from ..model.tiny import write_tokenizer


@cache
def model_folder() -> Path:
    """Return a folder with the tokenizer. It is written once and removed when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="rollway-testing-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_tokenizer(folder)
    return folder


@cache
def model() -> ModelConfig:
    return ModelConfig(
        path=str(model_folder()), renderer="qwen3", template={"enable_thinking": False}
    )


@cache
def rendering() -> SyncRenderer:
    return SyncRenderer(model())


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(str(model_folder()))
