"""Draws public names of rollway at random, first without their docstrings and then with them.

    python tools/draw_names.py SEED [COUNT]

Guess what each name does from the first list, then check the second. A wrong guess is a name to change.
"""

import ast
import random
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "rollway"
NUM_NAMES = 40
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def public_names() -> Iterator[tuple[str, str]]:
    """Yield every public class and function of a module with the first paragraph of its docstring."""
    for path in sorted(SOURCE.rglob("*.py")):
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, Definition) and not node.name.startswith("_"):
                docstring = (ast.get_docstring(node) or "").partition("\n\n")[0]
                yield f"{module}.{node.name}", " ".join(docstring.split())


def main() -> None:
    if len(sys.argv) < 2 or not all(argument.isdigit() for argument in sys.argv[1:]):
        sys.exit("usage: python tools/draw_names.py SEED [COUNT]")
    seed, count = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else NUM_NAMES
    names = list(public_names())
    drawn = random.Random(seed).sample(names, min(count, len(names)))
    for number, (name, _) in enumerate(drawn, 1):
        print(f"{number:3}  {name}")
    print()
    for number, (name, docstring) in enumerate(drawn, 1):
        print(f"{number:3}  {name}\n     {docstring or '(no docstring)'}")


if __name__ == "__main__":
    main()
