"""The shape of the code: imports, purity, where work runs, sizes, names and words."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "rollway"
FILES = sorted(SOURCE.rglob("*.py"))
PROSE_FILES = [
    *FILES,
    *sorted((ROOT / "tests").rglob("*.py")),
    *sorted((ROOT / "tests_vllm").glob("*.py")),
    *sorted((ROOT / "bench").rglob("*.py")),
    *sorted((ROOT / "docs").glob("*.py")),
    *sorted((ROOT / "tools").glob("*.py")),
]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *SOURCE.rglob("*.md")])

BASE = {"records", "errors"}
MAY_IMPORT = {
    "records": set(),
    "errors": set(),
    "config": BASE,
    "wire": BASE,
    "trace": BASE,
    "envs": BASE | {"loop"},
    "loop": BASE | {"config", "wire"},
    "payload": BASE | {"loop"},
    "model": BASE | {"config"},
    "rundir": BASE | {"config"},
    "observe": BASE | {"config", "wire", "loop", "rundir"},
    "ledger": BASE | {"loop", "rundir"},
    "transport": BASE | {"config", "loop", "wire", "payload", "rundir"},
    "inference": BASE | {"config", "loop", "wire", "model", "payload", "vllm"},
    "envserver": BASE | {"config", "loop", "wire", "envs", "trace", "payload", "inference", "model"},
    "testing": BASE | {"config", "loop", "wire", "envs", "trace", "model", "inference", "envserver"},
    "orchestrator": BASE | {"config", "loop", "wire", "payload", "inference", "envserver", "rundir",
                            "transport", "ledger", "observe", "evals", "model"},
    "trainer": BASE | {"config", "loop", "wire", "payload", "model", "rundir", "transport", "observe"},
    "vllm": set(),
    "warmup": BASE | {"config", "loop", "wire", "envs", "inference", "model", "observe", "rundir"},
    "resume": BASE | {"config", "ledger", "model", "observe", "payload", "rundir", "transport"},
    "launch": BASE | {"config", "loop", "rundir", "observe", "inference"},
    "evals": BASE | {"config", "loop", "wire", "envs", "payload", "envserver", "rundir", "observe",
                     "launch"},
    "simulate": BASE | {"config", "rundir", "orchestrator"},
    "preflight": BASE | {"config", "loop", "envs", "model", "inference"},
    "cli": BASE | {"config", "loop", "envs", "model", "payload", "rundir", "observe", "ledger",
                   "trainer", "launch", "orchestrator", "evals", "wire", "simulate", "inference",
                   "resume", "warmup", "preflight"},
}  # fmt: skip
PURE = ["trace", "orchestrator/core", "envserver/core"]
IMPURE = {"asyncio", "time", "random", "os", "threading", "socket", "zmq", "aiohttp"}

MAX_FUNCTION_LINES = 55
MAX_PARAMETERS = 6
MAX_MODULES_IN_FOLDER = 12
MAX_MODULES = 326
MAX_LINES = 37_000
MAX_FMT_SKIP = 117
MAX_MEAN_CODE_LINE = 42.2
SMALL_MODULE_LINES = 25

GLOSSARY_WORDS = {"turn", "row", "segment", "step", "version", "group", "task"}
GLOSSARY_HOMES = {
    "turn": {"records/turn.py", "envs", "testing"},
    "row": {"trace", "records/batch.py", "records/rollout.py", "testing/play.py", "model/packing.py",
            "trainer/row_rules.py"},
    "segment": {"payload", "records/payload.py"},
    "step": {"trainer/step.py", "orchestrator/shell/step_log.py", "observe", "records/ids.py"},
    "version": {"records/ids.py", "orchestrator/core", "transport", "inference/embedded/requests.py"},
    "group": {"records/group.py", "records/restored.py", "envserver/worker/group.py",
              "orchestrator/core", "wire/messages.py"},
    "task": {"records/task.py", "records/restored.py", "envs", "wire/messages.py", "orchestrator/core",
             "envserver/core/task_requests.py"},
}  # fmt: skip
"""Where a class or module may carry a word of the glossary: there it means what the glossary says."""

FORBIDDEN = {
    "is no": re.compile(r"\b(is|are) no\b(?! (longer|more)\b)", re.IGNORECASE),
    "so many": re.compile(r"\bso many\b", re.IGNORECASE),
    "so long": re.compile(r"\bso long\b(?! as\b)", re.IGNORECASE),
    "anew": re.compile(r"\banew\b", re.IGNORECASE),
    "for ever": re.compile(r"\bfor ever\b", re.IGNORECASE),
    "ever more seldom": re.compile(r"\bever more seldom\b", re.IGNORECASE),
}
"""Phrases that a reader has to read twice."""
THIS_FILE = Path(__file__)


def relative(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def imported(path: Path) -> set[str]:
    """Full names of the modules a file imports; relative ones resolved."""
    package = ["rollway", *path.relative_to(SOURCE).parts[:-1]]
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return names


def layer(module: str) -> str | None:
    parts = module.split(".")
    is_known = len(parts) > 1 and parts[0] == "rollway" and parts[1] in MAY_IMPORT
    return parts[1] if is_known else None


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_every_package_has_its_place() -> None:
    packages = {
        path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"
    }
    assert packages | {"errors"} == set(MAY_IMPORT)


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_imports_go_down_the_layers(path: Path) -> None:
    if len(path.relative_to(SOURCE).parts) == 1:
        return
    package = path.relative_to(SOURCE).parts[0]
    used = {layer(module) for module in imported(path)} - {None, package}
    assert used <= MAY_IMPORT[package], (
        f"{package} must not import {used - MAY_IMPORT[package]}"
    )


@pytest.mark.parametrize("folder", PURE)
def test_decisions_are_pure(folder: str) -> None:
    for path in (SOURCE / folder).rglob("*.py"):
        used = {module.split(".")[0] for module in imported(path)}
        assert not used & IMPURE, f"{path} imports {used & IMPURE}"


def test_the_core_imports_only_records_and_config() -> None:
    for path in (SOURCE / "orchestrator" / "core").rglob("*.py"):
        used = {layer(module) for module in imported(path)} - {None}
        assert used <= {"records", "config", "orchestrator"}, path
        assert not any("shell" in module for module in imported(path)), path


@pytest.mark.parametrize(
    "word", ["to_thread", "run_in_executor", "PoolExecutor", "time.sleep("]
)
def test_only_the_loop_package_places_work(word: str) -> None:
    outside = [path for path in FILES if path.relative_to(SOURCE).parts[0] != "loop"]
    assert not [path for path in outside if word in path.read_text()]


def test_functions_fit_on_a_screen() -> None:
    for path in FILES:
        for function in functions(path):
            length = (function.end_lineno or 0) - function.lineno + 1
            assert length <= MAX_FUNCTION_LINES, (
                f"{relative(path)}: {function.name} has {length} lines"
            )


def test_no_function_takes_many_parameters() -> None:
    """Functions of the command line have one parameter for each option."""
    crowded = []
    for path in FILES:
        for function in functions(path):
            arguments = function.args
            names = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            count = len([name for name in names if name.arg not in ("self", "cls")])
            if count > MAX_PARAMETERS and not is_command(path, function):
                crowded.append(f"{relative(path)}: {function.name} takes {count}")
    assert not crowded


def is_command(path: Path, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A command's function is registered in `cli/main.py` under its own name."""
    registered = f'"{path.stem}:{function.name}"'
    return (
        relative(path).startswith("cli/")
        and registered in (SOURCE / "cli" / "main.py").read_text()
    )


def test_public_class_names_are_unique() -> None:
    homes: defaultdict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(relative(path))
    assert not {name: paths for name, paths in homes.items() if len(paths) > 1}


def test_glossary_words_are_not_used_for_another_idea() -> None:
    strange = []
    for path in FILES:
        names = [path.stem] if path.stem != "__init__" else [path.parent.name]
        names += [
            node.name
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.ClassDef)
        ]
        for name in names:
            words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+", name)}
            for word in words & GLOSSARY_WORDS:
                if not any(relative(path).startswith(home) for home in GLOSSARY_HOMES[word]):
                    strange.append(f"{relative(path)}: {name} uses '{word}'")
    assert not strange


def test_no_folder_has_many_modules() -> None:
    """`cli` has one file for each command, `records` one for each noun that travels."""
    counts = Counter(path.parent for path in FILES if path.name != "__init__.py")
    crowded = {
        relative(folder): count
        for folder, count in counts.items()
        if count > MAX_MODULES_IN_FOLDER
    }
    assert set(crowded) <= {"cli", "records"}


def test_no_small_module_has_a_single_importer() -> None:
    importers: Counter[str] = Counter()
    for path in FILES:
        importers.update(imported(path))
    lonely = []
    for path in FILES:
        module = ".".join(["rollway", *path.relative_to(SOURCE).with_suffix("").parts])
        is_small = len(path.read_text().splitlines()) < SMALL_MODULE_LINES
        if is_small and not path.name.startswith("__") and importers[module] == 1:
            lonely.append(relative(path))
    assert not lonely


def test_the_tree_does_not_grow() -> None:
    texts = [path.read_text() for path in FILES]
    assert len(texts) <= MAX_MODULES
    assert sum(len(text.splitlines()) for text in texts) <= MAX_LINES
    assert sum(text.count("# fmt: skip") for text in texts) <= MAX_FMT_SKIP
    lengths = [length for text in texts for length in code_line_lengths(text)]
    assert sum(lengths) / len(lengths) <= MAX_MEAN_CODE_LINE


def code_line_lengths(text: str) -> Iterator[int]:
    """Yield the length of each line that is not empty, a comment or part of a docstring."""
    docstrings = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#") and number not in docstrings:
            yield len(line)


def strings_in(path: Path) -> Iterator[tuple[int, str]]:
    """Every string literal, docstring and comment of a Python file, with its line."""
    kinds = {
        tokenize.STRING,
        tokenize.COMMENT,
        getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING),
    }
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type in kinds:
            yield token.start[0], " ".join(token.string.split())


@pytest.mark.parametrize("phrase", FORBIDDEN)
def test_prose_is_plain(phrase: str) -> None:
    pattern, found = FORBIDDEN[phrase], []
    for path in PROSE_FILES:
        if path != THIS_FILE:
            found += [
                f"{path}:{line}" for line, text in strings_in(path) if pattern.search(text)
            ]
    for path in PAGES:
        text = " ".join(path.read_text().split())
        found += [
            f"{path}: …{text[match.start() - 30 : match.end() + 30]}…"
            for match in pattern.finditer(text)
        ]
    assert not found


def test_variables_carry_the_noun_of_what_they_hold() -> None:
    """`for engine in engines`, not a loop variable that says nothing."""
    pattern = re.compile(r"\bfor " + r"one in\b|\blambda " + r"one\b")
    found = [str(path) for path in PROSE_FILES if pattern.search(path.read_text())]
    assert not found


def test_attribute_docstrings_are_whole_sentences() -> None:
    strung = []
    for path in FILES:
        for line, text in strings_in(path):
            body = text.strip("\"' ")
            if text.startswith('"""') and (body.startswith("…") or body.endswith("…")):
                strung.append(f"{relative(path)}:{line}")
    assert not strung


def test_importing_rollway_is_light() -> None:
    heavy = "{'torch', 'transformers', 'renderers', 'numpy', 'zmq', 'aiohttp'}"
    code = f"import sys, rollway; print(sorted(set(sys.modules) & {heavy}))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
