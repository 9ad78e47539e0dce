"""Rows that share a forward pass do not see each other, whatever a model carries from token to token."""

from typing import Any

import pytest
import torch
from tools.model_table import tiny_config, tiny_model

from rollway.errors import ModelError
from rollway.model.attention import Head, _attend_flash
from rollway.model.packing import RowModel, RowTokens, similar_lengths
from rollway.model.proof import longest_window, open_rows, prove_rounded
from rollway.trainer.master import MasterWeights

LENGTHS = [70, 33, 5, 61]


@pytest.fixture(
    scope="module", params=["qwen3", "mistral", "gpt_oss", "qwen3_next", "llama4_text"]
)
def rows(request: pytest.FixtureRequest) -> RowModel:
    torch.set_num_threads(1)
    return open_rows(tiny_model(request.param))


def tokens(lengths: list[int]) -> list[RowTokens]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(300, (length,), generator=generator) for length in lengths]
    return [RowTokens(row, [len(row)], torch.arange(len(row))) for row in ids]


def joined(rows: list[RowTokens]) -> RowTokens:
    ids = torch.cat([row.token_ids for row in rows])
    return RowTokens(ids, [len(row.token_ids) for row in rows], torch.arange(len(ids)))


def gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()
    return {name: grad.clone() for name, grad in found.items() if grad is not None}


def test_logits_and_gradients_are_those_of_each_row_alone(rows: RowModel) -> None:
    parts, model = tokens(LENGTHS), rows.model
    model.set_attn_implementation("eager")
    alone = [model(input_ids=row.token_ids[None], use_cache=False).logits[0] for row in parts]
    torch.cat(alone).logsumexp(-1).sum().backward()
    expected = gradients(model)
    rows.use(rows.packing)
    for places in rows.split(LENGTHS):
        chosen = [parts[place] for place in places]
        with rows.logits(joined(chosen)) as logits:
            logits.logsumexp(-1).sum().backward()
        wanted = torch.cat([alone[place] for place in places])
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-3, rtol=1e-3, msg=name)


def test_the_way_is_chosen_by_proof() -> None:
    assert open_rows(tiny_model("mistral")).packing == "packed"
    with_state = open_rows(tiny_model("qwen3_next"))
    assert with_state.packing == "padded"
    assert "differ by" in with_state.errors["packed"]


def test_a_model_that_never_gives_the_same_twice_is_refused() -> None:
    model = tiny_model("qwen3")
    model.model.norm.register_forward_hook(
        lambda module, inputs, output: output + torch.randn_like(output)
    )
    with pytest.raises(
        ModelError, match=r"family 'qwen3' cannot be trained: two passes .* differ by"
    ):
        open_rows(model)


@pytest.mark.parametrize("lengths", [[1], [5, 5, 5], [100, 1, 99, 2, 98], list(range(1, 40))])
def test_padding_stays_small(lengths: list[int]) -> None:
    groups = similar_lengths(lengths)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        used = [lengths[row] for row in group]
        assert len(group) * max(used) <= 1.25 * sum(used)


def test_a_model_whose_tokens_see_later_ones_is_refused() -> None:
    with pytest.raises(
        ModelError, match=r"'bert' cannot be trained: tokens change .* the tokens before them"
    ):
        open_rows(tiny_model("bert"))


@pytest.mark.parametrize(
    ("family", "packing"),
    [("mistral", "packed"), ("qwen3_moe", "packed"), ("lfm2", "padded")],
)
def test_the_way_is_proven_again_after_rounding(family: str, packing: str) -> None:
    rows = open_rows(tiny_model(family))
    MasterWeights(rows.model, torch.bfloat16)
    prove_rounded(rows)
    assert rows.packing == packing


def test_after_rounding_rows_that_see_each_other_are_noticed() -> None:
    rows = open_rows(tiny_model("lfm2"))
    MasterWeights(rows.model, torch.bfloat16)
    rows.use("packed")
    prove_rounded(rows)
    assert rows.packing == "padded"


def test_a_model_that_cannot_be_rounded_is_refused_with_the_key_to_change() -> None:
    rows = open_rows(tiny_model("xlstm"))
    MasterWeights(rows.model, torch.bfloat16)
    with pytest.raises(ModelError, match=r"family 'xlstm'\) fails: .*; set trainer\.dtype ="):
        prove_rounded(rows)


@pytest.mark.parametrize(
    ("family", "window"), [("qwen3", 0), ("mistral", 24), ("gpt_neo", 24), ("mamba2", 256)]
)
def test_windows_are_found_under_the_names_of_many_families(family: str, window: int) -> None:
    assert longest_window(tiny_config(family)) == window


def test_flash_attention_is_asked_for_all_rows_at_once() -> None:
    """Only a GPU can compute it. Without data, torch checks the arguments and gives the shape."""
    query, key = (
        torch.empty(1, heads, 30, 16, device="meta", dtype=torch.bfloat16) for heads in (4, 2)
    )
    head = Head(scale=0.25, window=8, softcap=None, sinks=None)
    assert _attend_flash(query, key, key, head, [10, 20]).shape == (1, 30, 4, 16)
