"""Creates a tiny model and a tokenizer of bytes without downloading anything.

Only the model needs the `local` extra.
"""

import json
from pathlib import Path
from typing import Any

from msgspec import Struct
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>",
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
)  # fmt: skip
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)


def write_tokenizer(folder: Path) -> int:
    """Write a tokenizer with one token per byte and the special tokens of the Qwen3 family, and return
    the size of its vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    return int(tokenizer.get_vocab_size())


class TinyShape(Struct, frozen=True):
    hidden_size: int = 128
    num_layers: int = 2
    num_experts: int = 8
    topk: int = 2


def tiny_model(shape: TinyShape, vocab_size: int, eos_id: int, max_context: int) -> Any:
    """Return a Qwen3-MoE of about a million parameters with random weights; a Qwen3 without experts."""
    import torch
    from transformers import (
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": 2 * shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": max_context,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": eos_id,
        "pad_token_id": vocab_size - len(SPECIAL),
        "dtype": torch.float32,
    }
    if not shape.num_experts:
        return Qwen3ForCausalLM(Qwen3Config(**sizes))
    experts = {
        "moe_intermediate_size": shape.hidden_size,
        "num_experts": shape.num_experts,
        "num_experts_per_tok": min(shape.topk, shape.num_experts),
        "norm_topk_prob": True,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts))
