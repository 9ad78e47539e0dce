"""A model folder's tokenizer.json, opened without transformers: light enough for every worker."""

import os
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from ...errors import ModelError

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one text at a time needs no pool of threads


class Tokenizer:
    """What renderers need of a tokenizer: encode, decode, and ids of special tokens."""

    unk_token_id = None

    def __init__(self, folder: str) -> None:
        path = Path(folder) / "tokenizer.json"
        try:
            self._fast = FastTokenizer.from_buffer(path.read_bytes())
        except OSError as error:
            raise ModelError(f"cannot read the tokenizer of model '{folder}': {error}") from None
        except ValueError as error:
            raise ModelError(f"{path} is not a tokenizer: {error}") from None
        self.name_or_path = folder

    def __len__(self) -> int:
        return self._fast.get_vocab_size()

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        # alone or as a batch of one the ids are the same; only batches can do without offsets
        (encoded,) = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded.ids
        return ids

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        text: str = self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._fast.token_to_id(tokens)
        return [self._fast.token_to_id(token) for token in tokens]
