"""Docstrings name the thing or say what a function does; words are those of the
house."""

import re
from pathlib import Path

import pytest

from tests.house.test_docs_in_step import pages
from tests.house.tree import PROJECT, ROOT

RIDDLE = re.compile(r'^ *"""(What|Who|Where|How)\b', re.MULTILINE)
PRONOUN = re.compile(r"\b(?:some|any|every|no)body\b|\bwhoever\b", re.IGNORECASE)
# Words that had the meaning of another one; metrics keep the names that users know.
OLD_WORD = re.compile(
    r"(?<![a-z])(?:outlets?|lanes?|intake|opener|in[ _]hand"
    r"|doubtful(?!_count|_messages))(?![a-z])",
    re.IGNORECASE,
)


def prose_faults(name: str, text: str, *, pronouns: bool = True) -> list[str]:
    """Return a sentence for each riddle of a file, subject without a name, old word."""
    advice = {RIDDLE: "name the thing", OLD_WORD: "take the word of the house"}
    if pronouns:
        advice[PRONOUN] = "name the subject"
    return [
        f"{name}:{len(text[: found.end()].splitlines())} says"
        f" {found[found.lastindex or 0]!r}: {wish}"
        for pattern, wish in advice.items()
        for found in pattern.finditer(text)
    ]


def faults_of(path: Path) -> list[str]:
    # Tests call topics, users and others "nobody".
    name = PROJECT.rel(path)
    return prose_faults(name, path.read_text(), pronouns=not name.startswith("tests/"))


@pytest.mark.slow
def test_prose_is_plain() -> None:
    """No docstring begins with What, Who, Where or How; no subject is "nobody"."""
    examples = sorted((ROOT / "examples").rglob("*.py"))
    texts = {*PROJECT.sources, *PROJECT.others, *examples, *pages(ROOT)}
    texts.remove(Path(__file__))
    assert [fault for path in sorted(texts) for fault in faults_of(path)] == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('"""What a put needs."""', "x.py:1 says 'What': name the thing"),
        (
            'class A:\n    """Who\n    waits."""',
            "x.py:2 says 'Who': name the thing",
        ),
        ('a = 1\n"""Where it is."""', "x.py:2 says 'Where': name the thing"),
        ("# Nobody waits.", "x.py:1 says 'Nobody': name the subject"),
        ("a = 'for whoever asks'", "x.py:1 says 'whoever': name the subject"),
        ("find_outlets()", "x.py:1 says 'outlets': take the word of the house"),
        ("is_in_hand = 1", "x.py:1 says 'in_hand': take the word of the house"),
    ],
)
def test_planted_riddles_are_caught(text: str, fault: str) -> None:
    """Modules, classes, fields, comments, names and texts are looked at."""
    assert prose_faults("x.py", text) == [fault]


@pytest.mark.parametrize(
    "text",
    ['"""Whole records."""', '"""Size; what counts."""', 'a = "What?"', "planes"],
)
def test_plain_prose_passes(text: str) -> None:
    """Only the first word counts, and only in docstrings; words are whole."""
    assert prose_faults("x.py", text) == []
