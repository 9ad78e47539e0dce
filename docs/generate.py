"""Writes the pages of this folder that are made from code: metrics.md and configuration.md.

python docs/generate.py        (or: make docs)
"""

import ast
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

import tomli_w
from msgspec import NODEFAULT
from msgspec.inspect import (
    BoolType,
    DictType,
    Field,
    FloatType,
    IntType,
    LiteralType,
    NoneType,
    StrType,
    StructType,
    Type,
    UnionType,
    VarTupleType,
    type_info,
)

from rollway.config import sections
from rollway.observe.declared import SECTIONS, Metric

FOLDER = Path(__file__).parent

METRICS = """# Metrics

<!-- Written by `make docs` from src/rollway/observe/declared.py: change it there. -->

Every step is a line of `metrics.jsonl` in the run directory, a JSON object with the names below. The
same names go to W&B and TensorBoard; Prometheus sees them as [running.md](running.md) says. A word in
braces stands for a reward, an environment, a process, …. What does not occur in a step is not in its
line: a mean of nothing, a way to end that no rollout had. A process that was held names the culprits
under `stalls` of the line ([running.md](running.md)).

Where other frameworks say `reward/<env>/mean`, it is `env/<env>/reward/mean` here: an environment and a
reward function may have the same name.

*How often*: `step` is told once a step. `second` is also told to Prometheus once a second, as it is
then.
"""

CONFIGURATION = """# Configuration

<!-- Written by `make docs` from src/rollway/config/sections.py: change it there. -->

A run file is TOML. Only `name`, `model.path` and one `[[env]]` with its `id` are needed. Unknown keys,
wrong types and values out of range are refused with the key's path and the nearest valid name.
`--set section.key=value` changes a key for one run, `--set env.0.key=value` one of the first
environment; `--dry-run` prints all of them, resolved.
"""


def metrics_page() -> str:
    """One table a section, in the order of their declaration."""
    parts = [METRICS]
    for title, metrics in SECTIONS.items():
        rows = [_metric_row(metric) for metric in metrics]
        parts.append(_titled(title, "", ("name", "unit", "how often", "meaning"), rows))
    return "\n".join(parts)


def _metric_row(metric: Metric) -> tuple[str, ...]:
    often = "second" if metric.is_live else "step"
    return f"`{metric.name}`", metric.unit, often, metric.meaning


def configuration_page() -> str:
    """Make a table of the top-level keys, then one table for each section, in the order of the file."""
    return "\n".join(
        [CONFIGURATION, *_tables("Top of the file", "", sections.RunConfig, _meanings())]
    )


def _tables(
    title: str, path: str, kind: type, meanings: dict[str, dict[str, str]]
) -> Iterator[str]:
    """Yield the table of a section, then those of the sections in it."""
    info, meanings_here = type_info(kind), meanings[kind.__name__]
    assert isinstance(info, StructType)
    text = meanings_here[""] if path else ""
    rows = [
        (f"`{field.name}`", _words(field.type), _default(field), meanings_here[field.name])
        for field in info.fields if _section(field.type) is None
    ]  # fmt: skip
    yield _titled(title, text, ("key", "value", "default", "meaning"), rows)
    for field in info.fields:
        section = _section(field.type)
        if section is not None:
            name = f"{path}{field.name}"
            header = (
                f"`[[{name}]]`" if isinstance(field.type, VarTupleType) else f"`[{name}]`"
            )
            yield from _tables(header, f"{name}.", section.cls, meanings)


def _section(kind: Type) -> StructType | None:
    """Return the section that a field holds: one, a list of them, or one that may be missing."""
    match kind:
        case StructType():
            return kind
        case VarTupleType(item_type=item):
            return _section(item)
        case UnionType(types=types):
            return next((found for option in types if (found := _section(option))), None)
    return None


def _words(kind: Type) -> str:
    """Say which values a key takes."""
    match kind:
        case IntType() | FloatType():
            name = "whole number" if isinstance(kind, IntType) else "number"
            return f"{name}{_range(kind)}"
        case LiteralType(values=values):
            return " or ".join(f'`"{value}"`' for value in values)
        case BoolType():
            return "true or false"
        case StrType(pattern=pattern):
            return f"text, `{pattern}`" if pattern else "text"
        case DictType():
            return "table"
        case VarTupleType(item_type=item):
            return f"list of: {_words(item)}"
        case UnionType(types=types):
            return " or ".join(
                _words(option) for option in types if not isinstance(option, NoneType)
            )
    raise TypeError(f"no words for {kind}")


def _range(kind: IntType | FloatType) -> str:
    """Describe the bounds of a number: `above 0, at most 1`, `1 to 65535`, `0 or more`."""
    if kind.ge is not None and kind.le is not None:
        return f", {kind.ge:g} to {kind.le:g}"
    bounds = {"above": kind.gt, "at least": kind.ge, "below": kind.lt, "at most": kind.le}
    return "".join(
        f", {words} {bound:g}" for words, bound in bounds.items() if bound is not None
    )


def _default(key: Field) -> str:
    if key.default is None:
        return "none"
    if key.default is not NODEFAULT:
        return f"`{tomli_w.dumps({'x': key.default}).strip().removeprefix('x = ')}`"
    return "required" if key.default_factory is NODEFAULT else "`{}`"


def _meanings() -> dict[str, dict[str, str]]:
    """By class and key, the text under it; a class's own under ''. msgspec keeps none of them."""
    tree = ast.parse(inspect.getsource(sections))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return {
        node.name: {"": ast.get_docstring(node) or "", **_below_keys(node)}
        for node in classes
    }


def _below_keys(section: ast.ClassDef) -> dict[str, str]:
    found = {}
    for node, after in zip(section.body, section.body[1:], strict=False):
        match node, after:
            case ast.AnnAssign(target=ast.Name(id=key)), ast.Expr(
                value=ast.Constant(value=str(text))
            ):
                found[key] = " ".join(text.split())
    return found


def _titled(title: str, text: str, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    cells = [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    ]
    return "\n".join([f"## {title}", *([text] * bool(text)), "", *cells, ""])


PAGES: dict[str, Callable[[], str]] = {
    "metrics.md": metrics_page, "configuration.md": configuration_page
}  # fmt: skip


def main() -> None:
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())
        print(f"wrote {FOLDER / name}")


if __name__ == "__main__":
    main()
