"""Functions that examine a model folder and an environment, each in a process of its own.

User code and the libraries of a model run there, so that neither can hold up or end the command.
"""

import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from ..config.sections import ModelConfig
from ..envs.environment import Environment
from ..envs.in_lane import EnvSpec, take_tasks
from ..envs.toolbox import Toolbox
from ..envs.tools import Toolset
from ..errors import EnvironmentInvalid, ModelError, RollwayError, did_you_mean
from ..loop.watch import stacks
from ..model.folder import read_config
from ..model.shape import read_shape
from ..model.tiny import write_tokenizer
from ..records.task import Message, Split, Task

if TYPE_CHECKING:
    from ..inference.rendering.rendering import SyncRenderer, Tools

NUM_TASKS = 4
"""How many tasks are looked at. Later ones may still be wrong."""
GREETING = (Message("user", "Hello"),)
OTHER_GREETING = (Message("user", "Good morning"),)


class EnvFacts(Struct, frozen=True):
    """What an environment will send to the model, as far as this is known before it runs."""

    system_prompt: str
    prompts: tuple[tuple[str, str], ...]
    """Id and prompt of its first tasks. Empty if the environment decides itself what it says."""
    tools: tuple[dict[str, Any], ...]
    """The tools of its first task, in the shape of chat APIs."""


class PromptFacts(Struct, frozen=True):
    """How the renderer treats a prompt with tools."""

    num_tokens: int
    hidden_tools: tuple[str, ...] = ()
    """Tools whose name, or the name of a parameter, is not in the text that the policy gets to see."""
    reads_calls: bool = True
    """The renderer finds tool calls in replies."""
    tool_parsers: tuple[str, ...] = ()
    """The syntaxes of tool calls that the renderer `default` can be told to read."""


def examine_env(spec: EnvSpec, splits: Sequence[Split], may_be_empty: bool) -> EnvFacts:
    """Import the environment, build it, take its first tasks and look at their tools."""
    origin = f"environment '{spec.id}'"
    with _explaining(f"{origin} cannot be loaded"):
        env = spec.shared()
    for split in splits:
        has_own = type(env).eval_tasks is not Environment.eval_tasks
        method = "eval_tasks" if split == "eval" and has_own else "tasks"
        with _explaining(f"{method}() of {origin} failed"):
            tasks = take_tasks(spec, 0, NUM_TASKS, split)
        if not tasks and not may_be_empty:
            raise EnvironmentInvalid(f"{origin} has no tasks: {method}() yields none")
        _check_tasks(tasks, method, origin)
    with _explaining(f"tools() of {origin} failed"):
        tools = _tools(env, tasks[0], origin) if tasks else ()
    says_prompt = type(env).rollout is Environment.rollout
    prompts = tuple((task.id, task.prompt) for task in tasks) if says_prompt else ()
    return EnvFacts(env.system_prompt, prompts, tools)


def _check_tasks(tasks: Sequence[Task], method: str, origin: str) -> None:
    ids = [task.id for task in tasks]
    if twice := next((name for name in ids if ids.count(name) > 1), None):
        raise EnvironmentInvalid(
            f"two of the first tasks of {origin} have the id '{twice}': {method}() must give each one "
            "of its own"
        )


def _tools(env: Environment, task: Task, origin: str) -> tuple[dict[str, Any], ...]:
    toolsets = env.tools(task)
    wrong = [value for value in toolsets if not isinstance(value, Toolset)]
    if wrong:
        raise EnvironmentInvalid(
            f"tools() of {origin} returned a {type(wrong[0]).__name__}, not an rw.Toolset"
        )

    async def never_called(name: str, arguments: dict[str, Any]) -> None: ...

    return Toolbox(toolsets, never_called, 1.0).schemas


@contextmanager
def _explaining(problem: str) -> Iterator[None]:
    """Turn what user code raises into one line with the place where it was raised."""
    try:
        yield
    except RollwayError:
        raise
    except (Exception, SystemExit) as error:
        place = stacks.where_raised(error)
        text = f"{problem}: {type(error).__name__}: {error}"
        raise EnvironmentInvalid(f"{text}, at {place}" if place else text) from None


def examine_model(model: bytes, is_built: bool, is_loaded: bool) -> None:
    """Open the tokenizer, and render a greeting with the model's renderer or chat template. A model
    that transformers will load must be of a family that transformers knows."""
    logging.disable(
        logging.INFO
    )  # libraries tell what they choose, which belongs in no error
    config = msgspec.json.decode(model, type=ModelConfig)
    if is_built and is_loaded:
        _check_family(config)
    renderer = _renderer(model, is_built)
    try:
        prompt = renderer.prompt(GREETING)
        if is_built:
            _check_vocabulary(config, prompt)
        if prompt == renderer.prompt(OTHER_GREETING):
            raise ModelError(
                f"the chat template of the model in '{config.path}' ignores messages: 'Hello' and 'Good "
                "morning' give the same prompt; use the template that belongs to the model, or name its "
                "family in 'model.renderer' (docs/models.md)"
            )
    except RollwayError:
        raise
    except Exception as error:  # of a chat template, which is code
        raise ModelError(_explain_rendering(config, error)) from None


def _check_vocabulary(model: ModelConfig, prompt: list[int]) -> None:
    """Refuse a tokenizer that gives ids for which the model has no embedding."""
    shape = read_shape(model.path)
    if shape and shape.vocab_size and max(prompt, default=0) >= shape.vocab_size:
        raise ModelError(
            f"the tokenizer of the model in '{model.path}' gives 'Hello' the id {max(prompt)}, but "
            f"config.json says that the model has {shape.vocab_size} tokens (vocab_size): they do not "
            "belong together"
        )


def _explain_rendering(model: ModelConfig, error: Exception) -> str:
    text = str(error).partition("\n")[0]
    if "chat_template is not set" in text or "chat template" in text.lower():
        return (
            f"the model in '{model.path}' has no chat template, and renderer '{model.renderer}' needs "
            "one: name the model's family in 'model.renderer' (docs/models.md lists them), or add "
            "chat_template.jinja to the folder"
        )
    return (
        f"the chat template of the model in '{model.path}' cannot render a message: "
        f"{type(error).__name__}: {text}"
    )


def _check_family(model: ModelConfig) -> None:
    """Refuse a family that transformers does not know. Most families have a folder of their name in
    transformers, which is found in no time; only the import, which takes seconds, is exact."""
    config = read_config(model.path)
    family, installed = config["model_type"], find_spec("transformers")
    assert installed is not None, "the command has checked that it is installed"
    if Path(str(installed.origin)).with_name("models").joinpath(family).is_dir():
        return
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if family not in CONFIG_MAPPING_NAMES and "auto_map" not in config:
        hint = did_you_mean(family, CONFIG_MAPPING_NAMES) or "; a newer version may"
        raise ModelError(
            f"{model.path}/config.json names the family '{family}' (model_type), which transformers "
            f"{version('transformers')} does not know{hint}"
        )


def examine_prompt(
    model: bytes, is_built: bool, messages: Sequence[Message], tools: "Tools"
) -> PromptFacts:
    """Render a prompt with its tools, and look for the tools in the result."""
    renderer = _renderer(model, is_built)
    ids = renderer.prompt(messages, tools)
    text = renderer.decode(ids)
    hidden = tuple(
        tool["function"]["name"]
        for tool in tools
        if not all(word in text for word in _words_of(tool["function"]))
    )
    return PromptFacts(len(ids), hidden, renderer.reads_tool_calls, renderer.tool_parsers)


def _words_of(function: Mapping[str, Any]) -> list[str]:
    """Return the words that a policy needs in order to call a tool."""
    return [function["name"], *function["parameters"].get("properties", ())]


def may_use_wandb() -> bool:
    """Return whether W&B would take steps: it has a login, or is told to keep them on this machine."""
    import wandb

    is_online = wandb.setup().settings.mode == "online"
    return not is_online or bool(wandb.login(prompt=False))


@cache
def _renderer(model: bytes, is_built: bool) -> "SyncRenderer":
    """A model that a warm-up has yet to build gets the tokenizer that the warm-up will write."""
    # only this process needs the renderers, whose import takes most of a second
    from ..inference.rendering.rendering import SyncRenderer

    config = msgspec.json.decode(model, type=ModelConfig)
    if is_built:
        return SyncRenderer(config)
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        return SyncRenderer(msgspec.structs.replace(config, path=folder))
