"""Pages made from code are current, quoted messages exist, and links lead somewhere."""

import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Annotated

import msgspec
import pytest
from msgspec import Meta
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
def test_a_page_made_from_code_is_current(name: str) -> None:
    pages = generator().PAGES
    assert (DOCS / name).read_text() == pages[name](), "run 'make docs'"
    assert set(pages) == {"metrics.md", "configuration.md"}


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        (Meta(gt=0, le=1), "number, above 0, at most 1"),
        (Meta(ge=0, le=1), "number, 0 to 1"),
        (Meta(ge=2), "number, at least 2"),
        (Meta(lt=9), "number, below 9"),
    ],
    ids=str,
)
def test_both_bounds_of_a_number_are_on_the_page(meta: Meta, words: str) -> None:
    assert generator()._words(msgspec.inspect.type_info(Annotated[float, meta])) == words


def test_every_key_and_every_metric_is_on_its_page() -> None:
    configuration, metrics = (
        (DOCS / name).read_text() for name in ("configuration.md", "metrics.md")
    )
    for key in (
        "`[[env]]`",
        "`[warmup]`",
        "| `wandb_project` |",
        "| `max_off_policy_steps` |",
    ):
        assert key in configuration
    for name in (
        "`reward/all/mean`",
        "`stop/{condition}`",
        "`event_loop_lag/{process}/{stat}`",
    ):
        assert name in metrics
    empty = [
        line
        for line in configuration.splitlines()
        if line.startswith("| `") and line.endswith("|  |")
    ]
    assert not empty, "a key without a meaning"


@cache
def texts_in_source() -> list[str]:
    """Every text in the source, with … for what is filled in."""
    texts = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Constant(value=str(text)):
                    texts.append(text)
                case ast.JoinedStr(values=values):
                    parts = [
                        str(value.value) if isinstance(value, ast.Constant) else "…"
                        for value in values
                    ]
                    texts.append("".join(parts))
    return texts


def quotes(page: Path) -> Iterator[str]:
    yield from re.findall(r"\*\*`([^`]+)`\*\*", page.read_text())


def is_in_source(quote: str) -> bool:
    """Whether one text of the source has the words of the quote, in which … stands for anything."""
    parts = [re.escape(part.strip()) for part in quote.split("…")]
    pattern = re.compile(".*".join(parts), re.DOTALL)
    return any(pattern.search(text) for text in texts_in_source())


@pytest.mark.parametrize("name", ["troubleshooting.md", "failures.md"])
def test_messages_that_a_page_quotes_are_messages_of_rollway(name: str) -> None:
    found = [quote for quote in quotes(DOCS / name) if quote != "like this"]
    assert found
    assert not [quote for quote in found if not is_in_source(quote)]


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


def test_every_language_of_a_block_is_tested() -> None:
    assert languages() <= {"python", "toml", "bash", "json", "diff"}


def test_every_page_has_a_place_in_the_readme_and_starts_with_a_task() -> None:
    """The first block of a page comes early: a reader came to do something."""
    for page in DOCS.glob("*.md"):
        lines = page.read_text().splitlines()
        first = next(
            (at for at, line in enumerate(lines) if line.startswith(("```", "|"))), None
        )
        assert first is not None, page.name
        assert first <= 20, f"{page.name} has its first block or table in line {first + 1}"


def test_the_page_of_models_lists_all_renderers_and_parsers_of_tool_calls() -> None:
    import renderers
    from renderers.parsers import TOOL_PARSERS

    with pytest.raises(ValueError, match="Known:") as unknown:
        renderers.config_from_name("no such renderer")
    known = set(re.findall(r"'([^']+)'", str(unknown.value).partition("Known:")[2]))
    page = (ROOT / "docs" / "models.md").read_text()
    listed = page.partition("<!-- renderers")[2].partition("\n\n")[0]
    assert set(re.findall(r"`([^`]+)`", listed)) == known - {"auto", "default"}
    assert all(f"`{name}`" in page for name in TOOL_PARSERS)
