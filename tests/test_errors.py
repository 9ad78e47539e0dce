"""The tree drawn in `rollway/errors.py` shows every exception class of rollway under its base class."""

import ast
import builtins
import re
from pathlib import Path

import rollway.errors

SOURCE = Path(rollway.errors.__file__).parent
BRANCH = r"(?P<branch>|(?:[│ ]   )*[├└]── )"
DRAWN = re.compile(rf"^    {BRANCH}(?P<name>[A-Z]\w+)(?: {{2,}}\S.*)?$", re.MULTILINE)


def drawn_bases() -> dict[str, str]:
    """Return the base class of every exception below a root of the drawing."""
    bases, path = {}, []
    for line in DRAWN.finditer(rollway.errors.__doc__ or ""):
        depth = len(line["branch"]) // 4
        path = [*path[:depth], line["name"]]
        if depth:
            bases[line["name"]] = path[-2]
    return bases


def is_builtin_exception(name: str) -> bool:
    found = getattr(builtins, name, None)
    return isinstance(found, type) and issubclass(found, BaseException)


def written_bases() -> dict[str, str]:
    """Return the base class of every exception class in the source, without importing its modules."""
    classes = {
        node.name: [ast.unparse(base).rpartition(".")[2] for base in node.bases]
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    found: dict[str, str] = {}
    while True:
        new = {
            name: base
            for name, bases in classes.items()
            for base in bases
            if name not in found and (base in found or is_builtin_exception(base))
        }
        if not new:
            return found
        found |= new


def test_every_exception_is_drawn_below_its_base_class() -> None:
    written = written_bases()
    assert written.pop("RollwayError") == "Exception"
    assert drawn_bases() == written
