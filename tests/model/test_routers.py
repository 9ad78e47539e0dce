"""Replayed routes: of all layers or of those with experts, and of more experts than a byte can name."""

from typing import Any

import pytest
import torch
from tools.model_table import tiny_config, tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from rollway.errors import ModelError
from rollway.inference.embedded.slots import SeparateModel, SlotModel, open_slots
from rollway.model.routers import capture, check_replay, find_routers, replay

IDS = torch.arange(20)[None]


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    logits: Tensor = model(input_ids=IDS, use_cache=False).logits
    return logits


def test_routes_may_cover_all_layers_or_those_with_experts() -> None:
    model = tiny_model("glm4_moe").eval()
    routers = find_routers(model)
    assert [router.layer for router in routers] == [1, 2, 3]
    with capture(routers) as chosen:
        expected = logits_of(model)
    of_experts = torch.stack(chosen, 1)
    of_all = torch.cat((torch.zeros_like(of_experts[:, :1]), of_experts), 1)
    for routes in (of_experts, of_all, of_all.to(torch.uint8)):
        with replay(routers, routes):
            assert torch.equal(logits_of(model), expected)
    with pytest.raises(ModelError, match="routes of 2 layers, but the model has 3 layers"):
        replay(routers, of_experts[:, :2]).__enter__()


def test_groups_follow_the_experts_that_are_replayed() -> None:
    """Experts of two groups, where the router itself would choose from one."""
    model = tiny_model("deepseek_v3").eval()
    routers = find_routers(model)
    assert {router.num_groups for router in routers} == {2}
    routes = torch.tensor([[1, 6]]).expand(20, len(routers), 2)
    with replay(routers, routes), capture(routers) as chosen:
        logits = logits_of(model)
    assert all((choice == torch.tensor([1, 6])).all() for choice in chosen)
    assert not torch.equal(logits, logits_of(model))


def test_an_engine_with_many_experts_sends_wide_integers() -> None:
    torch.manual_seed(0)
    config = tiny_config("qwen3_moe")
    config.num_experts = 300
    model = AutoModelForCausalLM.from_config(config).eval()
    assert check_replay(model, find_routers(model)) == 0.0
    slots = open_slots(model, 2, 32)
    starts, lengths = torch.zeros(1, dtype=torch.long), torch.tensor([20])
    _, routes = slots.forward(0, IDS, starts, lengths)
    assert routes is not None
    assert routes.dtype == torch.uint16
    with capture(find_routers(model)) as chosen:
        logits_of(model)
    assert torch.equal(routes[0].long(), torch.stack(chosen, 1))


def test_in_16_bits_experts_of_some_tokens_may_differ() -> None:
    """One pass over a text and decoding it may round differently, and then a router may, too."""
    model = tiny_model("gpt_oss").to(torch.bfloat16)
    assert isinstance(open_slots(model, 2, 64), SlotModel)


@pytest.mark.parametrize("family", ["gptj", "falcon"])
def test_in_16_bits_a_text_that_is_decoded_wrongly_is_noticed(family: str) -> None:
    """These families do not let their attention be replaced."""
    model = tiny_model(family).to(torch.bfloat16)
    assert isinstance(open_slots(model, 2, 64), SeparateModel)


def test_a_model_whose_routers_are_not_found_is_named() -> None:
    with pytest.raises(
        ModelError, match=r"no routers were found in family 'phimoe'.*replay_routes"
    ):
        check_replay(tiny_model("phimoe").eval(), [])
