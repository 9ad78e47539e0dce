"""What is found out about a model and an environment without loading either into the launcher."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollway.config.sections import ModelConfig
from rollway.envs.in_lane import EnvSpec
from rollway.errors import ModelError
from rollway.preflight.in_lane import examine_env, examine_model, examine_prompt
from rollway.records.task import Message

ADD: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add_up", "description": "", "parameters": {"type": "object"}},
}
HELLO = (Message("user", "Hello"),)


def encoded(path: Path, renderer: str) -> bytes:
    return msgspec.json.encode(ModelConfig(path=str(path), renderer=renderer))


def test_a_family_shows_its_tools_and_reads_calls(tiny_moe: Path) -> None:
    facts = examine_prompt(encoded(tiny_moe, "qwen3"), True, HELLO, [ADD])
    assert (facts.hidden_tools, facts.reads_calls) == ((), True)
    without = examine_prompt(encoded(tiny_moe, "qwen3"), True, HELLO, [])
    assert without.num_tokens < facts.num_tokens


def test_a_template_that_ignores_tools_is_noticed(tiny_moe: Path) -> None:
    facts = examine_prompt(encoded(tiny_moe, "default"), True, HELLO, [ADD])
    assert (facts.hidden_tools, facts.reads_calls) == (("add_up",), False)
    assert "qwen3" in facts.tool_parsers


def test_a_template_that_shows_names_without_parameters_is_noticed(
    tiny_moe: Path, tmp_path: Path
) -> None:
    names = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    full = "{% for t in tools or [] %}{{ t | tojson }} {% endfor %}"
    function = {**ADD["function"], "parameters": {"properties": {"left": {}, "right": {}}}}
    tool = {"type": "function", "function": function}
    settings = json.loads((tiny_moe / "tokenizer_config.json").read_text())
    for folder, shown, hidden in (("names", names, ("add_up",)), ("full", full, ())):
        model = shutil.copytree(tiny_moe, tmp_path / folder)
        settings["chat_template"] = (
            shown + "{% for m in messages %}{{ m.content }}{% endfor %}"
        )
        (model / "tokenizer_config.json").write_text(json.dumps(settings))
        facts = examine_prompt(encoded(model, "default"), True, HELLO, [tool])
        assert facts.hidden_tools == hidden


def test_a_model_that_is_yet_to_be_built_has_the_tokenizer_of_the_warm_up() -> None:
    model = encoded(Path("/nowhere"), "qwen3")
    examine_model(model, False, True)
    assert examine_prompt(model, False, HELLO, []).num_tokens > 5


def test_a_family_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen33"}')
    with pytest.raises(ModelError, match=r"'qwen33' .* does not know; did you mean 'qwen3"):
        examine_model(encoded(tmp_path, "qwen3"), True, True)


def test_an_environment_shows_its_prompts_and_tools() -> None:
    facts = examine_env(EnvSpec("calculator", b"{}", 0), ("train", "eval"), False)
    assert [tool["function"]["name"] for tool in facts.tools]
    reverse = examine_env(EnvSpec("reverse-text", b"{}", 0), ("train",), False)
    assert reverse.tools == ()
