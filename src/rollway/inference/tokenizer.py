"""A model folder's tokenizer.json, opened without transformers: light enough for every worker."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from ..errors import ModelError


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
        ids: list[int] = self._fast.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        text: str = self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._fast.token_to_id(tokens)
        return [self._fast.token_to_id(token) for token in tokens]
