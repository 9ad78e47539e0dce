"""Mistakes that a newcomer makes: what is typed, and what rollway must say."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

SHOP = """
import rollway as rw


class Shop(rw.Environment):
    def __init__(self, level="easy"):
        self.level = level

    def tasks(self):
        for number in range(100):
            yield rw.Task(id=str(number), prompt="What does it cost?", answer="5")

    @rw.reward
    def exact(self, task, rollout):
        return float(task.answer in rollout.last_text)
"""
"""An environment in which nothing is wrong."""
RUN = """
name = "mine"
max_steps = 2
[model]
path = {model}
renderer = "qwen3"
[[env]]
id = "shop.py"
server = {{ workers = 1, concurrency = 16 }}
[sampling]
max_tokens = 6
[engine]
max_context = 128
[orchestrator]
batch_size = 16
group_size = 4
max_in_flight = 16
"""
FILES = {
    "no_tasks.py": SHOP.replace("def tasks", "def no_tasks"),
    "no_reward.py": SHOP.replace("    @rw.reward\n", ""),
    "syntax.py": SHOP.replace("def tasks(self):", "def tasks(self)"),
    "raises.py": SHOP.replace("self.level = level", "raise ValueError('no shop today')"),
    "signature.py": SHOP.replace("def exact(self, task, rollout)", "def exact(self, task)"),
    "empty.py": SHOP.replace("range(100)", "range(0)"),
    "strings.py": SHOP.replace('yield rw.Task(id=str(number), prompt="What does it cost?", answer="5")',
                               "yield 'What does it cost?'"),
    "leaves.py": "import sys\n\nsys.exit(3)\n",
    "lines.py": SHOP.replace("for number in range(100):\n            yield rw.Task(id=str(number), "
                             'prompt="What does it cost?", answer="5")',
                             'yield from rw.jsonl("tasks.jsonl")'),
    "tasks.jsonl": '{"prompt": "a", "answer": "b"}\n{"prompt": \n',
    "broken.toml": "name = \n",
}  # fmt: skip


class Mistake(Struct, frozen=True):
    """`words` are what is typed after `rollway`; `said` is a pattern of the one line that follows."""

    name: str
    words: tuple[str, ...]
    said: str
    code: int = 1


def train(name: str, said: str, *settings: str, dry: bool = False) -> Mistake:
    sets = [word for setting in settings for word in ("--set", setting)]
    return Mistake(name, ("train", "run.toml", *sets, *["--dry-run"] * dry), said)


MISTAKES = (
    train("misspelt key", r"unknown key 'orchestrator.bach_size' \(value 3\); did you mean "
          "'batch_size'?", "orchestrator.bach_size=3"),
    train("misspelt section", "unknown key 'orchestratr' .*did you mean 'orchestrator'",
          "orchestratr.batch_size=3"),
    train("misspelt key of an environment", "unknown key 'env.0.ratioo' .*did you mean 'ratio'",
          "env.0.ratioo=3"),
    Mistake("misspelt command", ("trian", "run.toml"), "No such command 'trian'", code=2),
    train("wrong type", "'orchestrator.batch_size' = 'many': expected a whole number",
          "orchestrator.batch_size=many"),
    train("out of range", "'sampling.temperature' = 0: expected a number, above 0",
          "sampling.temperature=0"),
    Mistake("no run file", ("train", "gone.toml"), "no run file at gone.toml"),
    Mistake("bad TOML", ("train", "broken.toml"), "broken.toml is not valid TOML: .*line 1"),
    train("no model, dry", "no model folder '/nowhere' .model.path.", "model.path=/nowhere", dry=True),
    train("no model", "no model folder '/nowhere' .model.path.", "model.path=/nowhere"),
    train("unknown argument, dry", "environment 'shop.py' does not take these args: .*'levle'",
          "env.0.args.levle=1", dry=True),
    train("unknown argument", "environment 'shop.py' does not take these args: .*'levle'",
          "env.0.args.levle=1"),
    train("no environment file, dry", "no environment file at .*/shoop.py", "env.0.id=shoop.py",
          dry=True),
    train("no environment file", "no environment file at .*/shoop.py", "env.0.id=shoop.py"),
    train("misspelt environment", "no environment 'revers-text'; did you mean 'reverse-text'",
          "env.0.id=revers-text"),
    train("no tasks()", r"'no_tasks.py': Shop has no method tasks\(\)", "env.0.id=no_tasks.py"),
    train("no reward", "'no_reward.py': Shop has no reward; mark at least one method",
          "env.0.id=no_reward.py"),
    train("syntax error", "'syntax.py' cannot be loaded: SyntaxError: .*syntax.py, line 9",
          "env.0.id=syntax.py"),
    train("bad line of JSON", "tasks.jsonl, line 2: ", "env.0.id=lines.py"),
    train("unknown renderer", "no renderer 'qwen9' for 'model.renderer'; did you mean 'qwen3'",
          "model.renderer=qwen9"),
    train("__init__ raises", r"cannot be loaded: ValueError: no shop today, at \S+raises.py:7 in "
          "Shop.__init__", "env.0.id=raises.py"),
    train("wrong signature", r"Shop.exact must take \(self, task, rollout\).*too many positional",
          "env.0.id=signature.py"),
    train("no task at all", r"'empty.py' has no tasks: tasks\(\) yields none", "env.0.id=empty.py"),
    train("tasks of a wrong type", r"tasks\(\) of environment 'strings.py' failed: TypeError: .*a str, "
          "not an rw.Task", "env.0.id=strings.py"),
    train("import that exits", "'leaves.py' cannot be loaded: SystemExit: 3, at .*leaves.py:3",
          "env.0.id=leaves.py"),
    train("port in use", "'engine.embedded.port' = {port} cannot be bound at 127.0.0.1: Address "
          "already in use; choose another", "engine.embedded.port={port}"),
    train("port of Prometheus in use", "'metrics.prometheus.port' = {port} cannot be bound",
          "metrics.prometheus.port={port}"),
    train("wrong choice", "'filters.gibberish' = 'enforced': expected one of 'enforce', 'monitor'; did "
          "you mean 'enforce'", "filters.gibberish=enforced"),
    train("no login of W&B", "'metrics.wandb_project' = 'mine', but W&B has no login here: run "
          "'wandb login'", "metrics.wandb_project=mine"),
    train("read-only folder", "cannot be (written|created)|has 0 MB free", "output_dir=/proc/mine"),
    train("folder that is a file", "cannot be created: .*/run.toml is a file", "output_dir=run.toml"),
    train("prompt that does not fit", "the first prompt of task '0' of environment 'shop.py' has .*, "
          "and a conversation may have 20", "engine.max_context=20"),
    Mistake("eval: unknown argument", ("eval", "shop.py", "-m", "{model}", "--renderer", "qwen3",
            "--args", '{{"levle": 1}}', "--max-tokens", "6", "--max-context", "128"),
            "environment 'shop.py' does not take these args: .*'levle'"),
    Mistake("eval: no model", ("eval", "shop.py", "-m", "/nowhere"), "no model folder '/nowhere'"),
    Mistake("serve: no reward", ("serve", "no_reward.py", "-m", "{model}", "--renderer", "qwen3",
            "--engine-url", "http://127.0.0.1:{port}"), "Shop has no reward"),
    Mistake("serve: no engine", ("serve", "run.toml"), "where is the engine. Give --engine-url"),
)  # fmt: skip


@contextmanager
def desk(folder: Path, model: Path) -> Iterator[dict[str, str]]:
    """Write the files that the mistakes need, and hold a port. Yield what fills their placeholders."""
    files = {**FILES, "shop.py": SHOP, "run.toml": RUN.format(model=json.dumps(str(model)))}
    for name, text in files.items():
        (folder / name).write_text(text)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield {"model": str(model), "port": str(taken.getsockname()[1])}
