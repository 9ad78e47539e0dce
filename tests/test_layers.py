"""The shape of the code: who may import whom, what is pure, where work runs, how long functions are."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "rollway"
FILES = sorted(SOURCE.rglob("*.py"))

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
    "ledger": BASE | {"loop"},
    "transport": BASE | {"config", "loop", "wire", "payload", "rundir"},
    "inference": BASE | {"config", "loop", "wire", "model", "payload"},
    "envserver": BASE | {"config", "loop", "wire", "envs", "trace", "payload", "inference"},
    "testing": BASE | {"config", "loop", "envs", "trace", "model", "inference", "envserver"},
    "orchestrator": BASE | {"config", "loop", "wire", "payload", "inference", "envserver", "rundir",
                            "transport", "ledger", "observe", "evals"},
    "trainer": BASE | {"config", "loop", "wire", "payload", "model", "rundir", "transport"},
    "warmup": BASE | {"config", "loop", "wire", "envs", "inference", "model", "observe", "rundir"},
    "resume": BASE | {"config", "ledger", "observe", "payload", "rundir", "transport"},
    "launch": BASE | {"config", "loop", "rundir", "observe", "resume"},
    "evals": BASE | {"config", "loop", "wire", "envs", "payload", "envserver", "rundir", "observe",
                     "launch"},
    "cli": BASE | {"config", "loop", "envs", "model", "payload", "rundir", "observe", "ledger",
                   "trainer", "launch", "orchestrator", "evals", "wire", "simulate", "inference",
                   "resume", "warmup"},
    "simulate": BASE | {"config", "rundir", "orchestrator"},
}  # fmt: skip
PURE = ["trace", "orchestrator/core", "envserver/core"]
IMPURE = {"asyncio", "time", "random", "os", "threading", "socket", "zmq", "aiohttp"}


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
    known = len(parts) > 1 and parts[0] == "rollway" and parts[1] in MAY_IMPORT
    return parts[1] if known else None


def test_every_package_has_its_place() -> None:
    packages = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert packages | {"errors"} == set(MAY_IMPORT)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_down_the_grain(path: Path) -> None:
    if len(path.relative_to(SOURCE).parts) == 1:
        return
    mine = path.relative_to(SOURCE).parts[0]
    used = {layer(module) for module in imported(path)} - {None, mine}
    assert used <= MAY_IMPORT[mine], f"{mine} must not import {used - MAY_IMPORT[mine]}"


@pytest.mark.parametrize("folder", PURE)
def test_decisions_are_pure(folder: str) -> None:
    for path in (SOURCE / folder).rglob("*.py"):
        used = {module.split(".")[0] for module in imported(path)}
        assert not used & IMPURE, f"{path} imports {used & IMPURE}"


def test_the_core_knows_records_and_itself_only() -> None:
    for path in (SOURCE / "orchestrator" / "core").rglob("*.py"):
        used = {layer(module) for module in imported(path)} - {None}
        assert used <= {"records", "config", "orchestrator"}, path
        assert not any("shell" in module for module in imported(path)), path


@pytest.mark.parametrize("word", ["to_thread", "run_in_executor", "PoolExecutor", "time.sleep("])
def test_work_is_placed_by_the_loop_package_only(word: str) -> None:
    outside = [path for path in FILES if "loop" not in path.relative_to(SOURCE).parts]
    assert not [path for path in outside if word in path.read_text()]


def test_functions_fit_on_a_screen() -> None:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= 55, f"{path.name}: {node.name} has {length} lines"


def test_importing_rollway_is_light() -> None:
    heavy = "{'torch', 'transformers', 'renderers', 'numpy', 'zmq', 'aiohttp'}"
    code = f"import sys, rollway; print(sorted(set(sys.modules) & {heavy}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
