"""Each document that a file cites is here, with the section that it names."""

import re
from pathlib import Path

import pytest

from tests.house.tree import ROOT

ROOMS = ("metaq", "tests", "docs", "scripts", "config", "examples", "bench")
KINDS = {".py", ".md", ".ini", ".txt", ".toml", ""}
# A path, and the sections after it: `docs/metaq-1.4/broker.md 1.4 to 1.6 and 2`.
NUMBER = r"\d+(?:\.\d+)*"
CITED = re.compile(
    rf"(?<![\w./-])(docs/[\w./-]+\.md)`?((?:(?:,|;| and| to)? {NUMBER}\b(?!\.\d))*)"
)
ELSEWHERE = re.compile(r"\b(?:[b]roker|[c]lient|[s]park) spec\b")
HEADING = re.compile(rf"^#+ ({NUMBER})\b", re.MULTILINE)
# Paths that begin a line of a comment or a docstring go on in the next one.
FOLDED = re.compile(r"\n[ \t]*(?:[#;>][ \t]*)?")


def cited_faults(root: Path, name: str, text: str) -> list[str]:
    """Name each document and each section that a text cites and that is not there."""
    faults = []
    for path, sections in CITED.findall(FOLDED.sub(" ", text)):
        page = root / path
        if not page.is_file():
            faults.append(f"{name} cites {path}, which is not there")
            continue
        headings = set(HEADING.findall(page.read_text()))
        faults += [
            f"{name} cites {path} {number}, which has no such heading"
            for number in re.findall(NUMBER, sections)
            if number not in headings
        ]
    return faults


def texts(root: Path) -> list[Path]:
    """Return the files that people read: sources, pages, transcripts, settings."""
    found = [*root.glob("*.md"), *root.glob("*.toml")]
    for room in ROOMS:
        found += [p for p in (root / room).rglob("*") if p.suffix in KINDS]
    return sorted(p for p in found if p.is_file() and "__pycache__" not in p.parts)


@pytest.mark.slow
def test_cited_documents_and_sections_are_there() -> None:
    """A reader can open each page that a file names, at the section it names."""
    faults = []
    for path in texts(ROOT):
        if path.name not in {"test_citations.py", "test_checkers.py"}:
            name = path.relative_to(ROOT).as_posix()
            faults += cited_faults(
                ROOT, name, path.read_bytes().decode(errors="replace")
            )
    assert faults == []


@pytest.mark.slow
def test_no_file_cites_a_document_that_a_reader_does_not_have() -> None:
    """MetaQ 1.4 is described in docs/metaq-1.4, and cited as that."""
    assert [
        str(path.relative_to(ROOT))
        for path in texts(ROOT)
        if ELSEWHERE.search(FOLDED.sub(" ", path.read_bytes().decode(errors="replace")))
    ] == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("see docs/no.md", "cites docs/no.md, which is not there"),
        ("docs/a.md 1.2 to 1.4", "cites docs/a.md 1.4, which has no such heading"),
        ("(docs/a.md 1 and\n    # 3)", "cites docs/a.md 3, which has no such heading"),
        ("`docs/a.md`, 9.9.", "cites docs/a.md 9.9, which has no such heading"),
    ],
)
def test_a_planted_citation_is_caught(tmp_path: Path, text: str, fault: str) -> None:
    """Pages and sections, also those that a line break separates."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("# 1 One\n\n## 1.2 Two\n")
    assert cited_faults(tmp_path, "x", text) == [f"x {fault}"]


@pytest.mark.parametrize("text", ["docs/a.md 1.2.", "docs/a.md, row 3", "docs/a.md#b"])
def test_a_true_citation_passes(tmp_path: Path, text: str) -> None:
    """Rows and anchors are no sections."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("# 1 One\n\n## 1.2 Two\n")
    assert cited_faults(tmp_path, "x", text) == []
