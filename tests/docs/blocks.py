"""The fenced blocks of the pages, with their languages and why some are not run."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^>]+) -->\n)?^ *```(?P<language>\w*)\n"
    r"(?P<text>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
CODE = {"python", "sh", "sql", "ini"}
"""`text` is for drawings and output."""


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    reason: str | None
    """Why no test runs it; None for those that a test runs."""


def pages(root: Path = ROOT) -> list[Path]:
    """Return the pages with blocks for users and developers."""
    top = [p for p in sorted(root.glob("*.md")) if p.name != "CHANGELOG.md"]
    rooms = ("docs", "metaq", "bench")
    return top + [p for room in rooms for p in sorted((root / room).rglob("*.md"))]


def blocks_of(page: Path, root: Path = ROOT) -> list[Block]:
    """Return the blocks of a page in its order."""
    text = page.read_text()
    return [
        Block(
            page.relative_to(root).as_posix(),
            text.count("\n", 0, found.start("language")) + 1,
            found["language"],
            found["text"],
            found["reason"],
        )
        for found in BLOCK.finditer(text)
    ]
