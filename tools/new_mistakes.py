"""Makes thirty mistakes with a Llama model and an environment with tools, and prints what rollway says.

    python tools/new_mistakes.py            # all of them, about two minutes
    python tools/new_mistakes.py template   # those with this word in their name

Each answer should name what is wrong, where, and what to do. Exits with 1 if one of them is a traceback,
does not fail, or leaves something behind.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHELF = '''
import rollway as rw


class Shelf(rw.Toolset):
    def __init__(self):
        self.items = {"tea": 4, "rice": 2}

    @rw.tool
    async def look_up(self, item: str) -> int:
        """Return how many of an item are on the shelf."""
        return self.items[item]


class Inventory(rw.Environment):
    system_prompt = "You count what is on the shelf."
    max_turns = 4

    def __init__(self, items: int = 20):
        self.items = items

    def tasks(self):
        for number in range(self.items):
            yield rw.Task(id=f"item-{number}", prompt=f"How many of item {number}?", answer=number)

    def tools(self, task):
        return [Shelf()]

    @rw.reward(weight=2.0)
    def counted(self, task, rollout) -> float:
        return float(str(task.answer) in rollout.last_text)

    @rw.stop
    def is_done(self, task, chat) -> bool:
        return "done" in chat.messages[-1].content
'''
TEMPLATE = (
    "{% if tools %}Tools: {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
RUN = """
name = "inventory"
max_steps = 2
[model]
path = "llama"
renderer = "default"
template = { tool_parser = "qwen3" }
[[env]]
id = "inventory.py"
[sampling]
max_tokens = 8
[engine]
max_context = 512
[orchestrator]
batch_size = 8
group_size = 4
max_in_flight = 8
"""


def build_llama(folder: Path) -> None:
    """Write a Llama of a few thousand weights, with a tokenizer of bytes and a chat template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rollway.model.load import save_weights
    from rollway.model.tiny import write_tokenizer

    folder.mkdir()
    vocab_size = write_tokenizer(folder)
    settings = folder / "tokenizer_config.json"
    changed = {**json.loads(settings.read_text()), "chat_template": TEMPLATE}
    settings.write_text(json.dumps(changed))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=vocab_size - 7,
    )  # fmt: skip
    save_weights(LlamaForCausalLM(config), folder)


def changed_env(old: str, new: str) -> dict[str, str]:
    assert old in SHELF, old
    return {"inventory.py": SHELF.replace(old, new)}


def changed_json(path: str, **keys: object) -> "dict[str, object]":
    return {path: keys}


TRAIN = ("train", "run.toml", "--dry-run")
MISTAKES: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "weights missing": ({"llama/model.safetensors": None}, ("train", "run.toml")),
    "weights empty": ({"llama/model.safetensors": ""}, ("train", "run.toml")),
    "config is not JSON": ({"llama/config.json": "{"}, TRAIN),
    "config without family": ({"llama/config.json": "{}"}, TRAIN),
    "family misspelt": (changed_json("llama/config.json", model_type="lama"), TRAIN),
    "tokenizer missing": ({"llama/tokenizer.json": None}, TRAIN),
    "tokenizer damaged": ({"llama/tokenizer.json": "{}"}, TRAIN),
    "template missing": (changed_json("llama/tokenizer_config.json", chat_template=None), TRAIN),
    "template with a syntax error": (
        changed_json("llama/tokenizer_config.json", chat_template="{% for m in %}"), TRAIN),
    "template without tools": (
        changed_json("llama/tokenizer_config.json",
                     chat_template=TEMPLATE.replace("{% if tools %}", "{% if false %}")), TRAIN),
    "template that raises": (
        changed_json("llama/tokenizer_config.json",
                     chat_template="{{ raise_exception('only one message') }}"), TRAIN),
    "no parser of tool calls": ({}, (*TRAIN, "--set", "model.template={}")),
    "unknown parser of tool calls": ({}, (*TRAIN, "--set", "model.template.tool_parser=llama9")),
    "unknown option of the template": ({}, (*TRAIN, "--set", "model.template.tool_parsr=qwen3")),
    "renderer of another family": ({}, (*TRAIN, "--set", "model.renderer=gpt-oss")),
    "routes of a dense model": ({}, (*TRAIN, "--set", "engine.routes=true")),
    "reply longer than the model's positions": (
        {}, (*TRAIN, "--set", "sampling.max_tokens=2000", "--set", "engine.max_context=4000")),
    "tools and system prompt do not fit": ({}, (*TRAIN, "--set", "engine.max_context=64")),
    "tool without a type": (changed_env("item: str", "item"), TRAIN),
    "two tools of one name": (changed_env("return [Shelf()]", "return [Shelf(), Shelf()]"), TRAIN),
    "tools() returns a class": (changed_env("return [Shelf()]", "return [Shelf]"), TRAIN),
    "tools() raises": (changed_env("return [Shelf()]", "return [Shelf(task.info['x'])]"), TRAIN),
    "stop condition is async": (changed_env("    def is_done", "    async def is_done"), TRAIN),
    "stop condition without chat": (changed_env("def is_done(self, task, chat)",
                                                "def is_done(self, task)"), TRAIN),
    "max_turns is a text": (changed_env("max_turns = 4", 'max_turns = "4"'), TRAIN),
    "task without an id": (changed_env('id=f"item-{number}", ', ""), TRAIN),
    "answer that cannot be sent": (changed_env("answer=number", "answer=object()"), TRAIN),
    "package that is not installed": (
        changed_env("import rollway as rw", "import rollway as rw\nimport sympyy"), TRAIN),
    "two classes": (
        changed_env("class Inventory", "class Other(rw.Environment): ...\n\n\nclass Inventory"), TRAIN),
    "argument of a wrong type": ({}, (*TRAIN, "--set", "env.0.args.items=many")),
    "key of the engine not set": (
        {}, (*TRAIN, "--set", "engine.external.url=http://localhost:1", "--set",
             "engine.external.key_var=NO_SUCH_KEY")),
    "address without http": (
        {}, (*TRAIN, "--set", "engine.external.url=localhost:8000")),
    "advantage function that is not there": (
        {}, (*TRAIN, "--set", "orchestrator.advantage=mine.py:credit")),
    "folder of keys missing": (
        {}, (*TRAIN, "--set", "env.0.external.address=tcp://10.0.0.1:5", "--set",
             "env.0.external.keys=keys", "--set", "payload.store=frames")),
    "batch that holds no whole groups": ({}, (*TRAIN, "--set", "orchestrator.batch_size=10")),
    "template that ignores messages": (
        changed_json("llama/tokenizer_config.json", chat_template="hello"), TRAIN),
    "weights cut off": ({"llama/model.safetensors": ("cut", 500)}, TRAIN),
    "more layers than config.json says": (changed_json("llama/config.json", num_hidden_layers=1), TRAIN),
    "fewer tokens than the tokenizer has": (changed_json("llama/config.json", vocab_size=50), TRAIN),
    "learning rate without end": ({}, (*TRAIN, "--set", "trainer.lr=inf")),
    "seed that no message can hold": ({}, (*TRAIN, "--set", "seed=99999999999999999999")),
    "advantage function of another kind": (
        {}, (*TRAIN, "--set", "orchestrator.advantage=json:dumps")),
    "eval of a name that is not served": ({}, ("eval", "inventry", "-m", "llama")),
    "serve an environment that the file lacks": (
        {}, ("serve", "run.toml", "--env", "inventry", "--engine-url", "http://localhost:1")),
}  # fmt: skip


def prepare(folder: Path, changes: dict[str, object]) -> None:
    for name, change in changes.items():
        path = folder / name
        if change is None:
            path.unlink()
        elif isinstance(change, tuple):
            os.truncate(path, change[1])
        elif isinstance(change, dict):
            before = json.loads(path.read_text())
            after = {
                key: value for key, value in {**before, **change}.items() if value is not None
            }
            path.write_text(json.dumps(after))
        else:
            path.write_text(str(change))


def make(name: str, model: Path) -> bool:
    """Make one mistake in a folder of its own, and print the answer. Return whether it is a good one."""
    changes, words = MISTAKES[name]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "llama").mkdir()
        for path in model.iterdir():
            (folder / "llama" / path.name).write_bytes(path.read_bytes())
        (folder / "inventory.py").write_text(SHELF)
        (folder / "run.toml").write_text(RUN)
        prepare(folder, changes)
        start_s = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "rollway", *words],
            cwd=folder,
            capture_output=True,
            text=True,
        )
        left = (folder / "outputs").exists()
    said = done.stderr.strip()
    is_good = done.returncode == 1 and "Traceback" not in said and not left and bool(said)
    print(
        f"{'' if is_good else 'BAD '}{name} ({time.monotonic() - start_s:.1f} s)\n    {said}\n",
        flush=True,
    )
    return is_good


def main() -> None:
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    names = [name for name in MISTAKES if wanted in name]
    with tempfile.TemporaryDirectory() as place:
        model = Path(place, "llama")
        build_llama(model)
        bad = [name for name in names if not make(name, model)]
    print(
        f"{len(names)} mistakes, {len(bad)} answered badly{': ' + ', '.join(bad) if bad else ''}"
    )
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
