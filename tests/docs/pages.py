"""The pages people read, and the blocks of code in them."""

import re
import shlex
from pathlib import Path

from msgspec import Struct

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]
_FENCED = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)


class Block(Struct, frozen=True):
    """One fenced block: where, in which language, and its text."""

    page: str
    line: int
    language: str
    text: str

    @property
    def label(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def needs(self) -> str:
        """Why the block cannot run here. The page says so with a comment `# needs …`."""
        found = re.search(r"# needs (.+)", self.text)
        return found[1] if found else ""


class Line(Struct, frozen=True):
    """One command of a block, split into words as a shell does."""

    block: Block
    words: tuple[str, ...]

    @property
    def program(self) -> str:
        """The program without its folder, and without variables set before it."""
        return next((word for word in self.words if "=" not in word), "").rpartition("/")[2]

    @property
    def args(self) -> list[str]:
        return list(self.words[1:])

    @property
    def label(self) -> str:
        return f"{self.block.label} {' '.join(self.words)}"


def blocks(language: str) -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in _FENCED.finditer(text):
            if match[1] == language:
                line = text[: match.start()].count("\n") + 1
                found.append(Block(str(page.relative_to(ROOT)), line, language, match[2]))
    return found


def languages() -> set[str]:
    return {match[1] for page in PAGES for match in _FENCED.finditer(page.read_text())}


def commands() -> list[Line]:
    """Every command of every bash block. A line that ends with a backslash continues."""
    found = []
    for block in blocks("bash"):
        for line in block.text.replace("\\\n", " ").splitlines():
            words = tuple(shlex.split(line, comments=True))
            if words:
                found.append(Line(block, words))
    return found
