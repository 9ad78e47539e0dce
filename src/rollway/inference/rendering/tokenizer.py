"""Opens a model folder's tokenizer.json without transformers, so that every worker can afford it."""

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from ...errors import ModelError
from ...model.folder import hub_name_of

# texts are encoded one at a time
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


MAX_REMEMBERED, MAX_REMEMBERED_CHARS = 4_096, 32
"""Renderers ask for the same few pieces of a template, and for single tokens, in every turn."""


class Tokenizer:
    """The part of a tokenizer that renderers use: encode, decode, and the ids of special tokens."""

    unk_token_id = None

    def __init__(self, folder: str) -> None:
        path = Path(folder) / "tokenizer.json"
        try:
            self._fast = FastTokenizer.from_buffer(path.read_bytes())
        except OSError as error:
            raise ModelError(
                f"cannot read the tokenizer of model '{folder}': {error}"
            ) from None
        except ValueError as error:
            raise ModelError(f"{path} is not a tokenizer: {error}") from None
        remember = lru_cache(MAX_REMEMBERED)
        self._encode_short = remember(self._encode)
        self._decode_one = remember(self._decode_token)
        self._id_of = remember(self._fast.token_to_id)
        self.name_or_path = hub_name_of(folder) or folder
        """Renderers are chosen by the name that a model has on the hub."""

    def __len__(self) -> int:
        return self._fast.get_vocab_size()

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        if len(text) <= MAX_REMEMBERED_CHARS:
            return list(self._encode_short(text, add_special_tokens))
        return self._encode(text, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # a batch of one gives the same ids, and only batches can leave out the offsets, which saves time
        (encoded,) = self._fast.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        ids: list[int] = encoded.ids
        return ids

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        ids = list(token_ids)
        if len(ids) == 1:
            return self._decode_one(ids[0], skip_special_tokens)
        text: str = self._fast.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def _decode_token(self, token: int, skip_special_tokens: bool) -> str:
        text: str = self._fast.decode([token], skip_special_tokens=skip_special_tokens)
        return text

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._id_of(tokens)
        return [self._id_of(token) for token in tokens]
