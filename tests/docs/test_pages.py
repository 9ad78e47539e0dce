"""Pages that are made from code are current, and what others quote and point to is there."""

import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from tests.docs.pages import PAGES, ROOT, languages

SOURCE = ROOT / "src" / "rollway"
DOCS = ROOT / "docs"


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["metrics.md", "configuration.md"])
def test_a_page_that_is_made_from_code_is_current(name: str) -> None:
    pages = generator().PAGES
    assert (DOCS / name).read_text() == pages[name](), "run 'make docs'"
    assert set(pages) == {"metrics.md", "configuration.md"}


def test_every_key_and_every_metric_stands_in_its_page() -> None:
    configuration, metrics = ((DOCS / name).read_text() for name in ("configuration.md", "metrics.md"))
    for key in ("`[[env]]`", "`[warmup]`", "| `wandb_project` |", "| `max_off_policy_steps` |"):
        assert key in configuration
    for name in ("`reward/all/mean`", "`stop/{condition}`", "`event_loop_lag/{process}/{stat}`"):
        assert name in metrics
    empty = [
        line for line in configuration.splitlines() if line.startswith("| `") and line.endswith("|  |")
    ]
    assert not empty, "a key without a meaning"


@cache
def said_in_source() -> list[str]:
    """Every text in the source; what is filled in stands as …"""
    texts = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Constant(value=str(text)):
                    texts.append(text)
                case ast.JoinedStr(values=values):
                    texts.append("".join(
                        str(one.value) if isinstance(one, ast.Constant) else "…" for one in values
                    ))  # fmt: skip
    return texts


def quotes(page: Path) -> Iterator[str]:
    yield from re.findall(r"\*\*`([^`]+)`\*\*", page.read_text())


def is_said(quote: str) -> bool:
    """Whether the words of a quote, … standing for anything, are in one text of the source."""
    parts = [re.escape(part.strip()) for part in quote.split("…")]
    pattern = re.compile(".*".join(parts), re.DOTALL)
    return any(pattern.search(text) for text in said_in_source())


@pytest.mark.parametrize("name", ["troubleshooting.md", "failures.md"])
def test_what_a_page_says_that_rollway_says_it_says(name: str) -> None:
    found = [quote for quote in quotes(DOCS / name) if quote != "like this"]
    assert found
    assert not [quote for quote in found if not is_said(quote)]


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(there), f"{page.name}: {target}"


def test_the_readme_names_every_page() -> None:
    readme = (ROOT / "README.md").read_text()
    assert all(f"docs/{page.name}" in readme for page in DOCS.glob("*.md"))


def test_languages_of_blocks_are_those_that_are_tested() -> None:
    assert languages() <= {"python", "toml", "bash", "json"}
