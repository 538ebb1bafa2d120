"""Docstrings name the thing or say what a function does; subjects have names."""

import ast
import re
from pathlib import Path

import pytest

from tests.house.tree import PROJECT

RIDDLE = re.compile(r"(What|Who|Where)\b")
PRONOUN = re.compile(r"\b(some|any|every|no)body\b|\bwhoever\b", re.IGNORECASE)


def prose_faults(name: str, text: str, nodes: list[ast.AST]) -> list[str]:
    """Return a sentence for each riddle of a file and each subject without a name."""
    riddles = [
        f"{name}:{node.lineno} begins with {found[0]!r}: name the thing"
        for node in nodes
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and (found := RIDDLE.match(node.value.value.lstrip()))
    ]
    pronouns = [
        f"{name}:{number} says {found[0]!r}: name the subject"
        for number, line in enumerate(text.splitlines(), 1)
        if (found := PRONOUN.search(line))
    ]
    return riddles + pronouns


def faults_of(path: Path) -> list[str]:
    return prose_faults(PROJECT.rel(path), path.read_text(), PROJECT.nodes(path))


def test_docstrings_are_no_riddles() -> None:
    """No docstring begins with What, Who or Where; no text speaks of nobody."""
    assert [fault for path in PROJECT.sources for fault in faults_of(path)] == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('"""What a put needs."""', "x.py:1 begins with 'What': name the thing"),
        (
            'class A:\n    """Who\n    waits."""',
            "x.py:2 begins with 'Who': name the thing",
        ),
        ('a = 1\n"""Where it is."""', "x.py:2 begins with 'Where': name the thing"),
        ("# Nobody waits.", "x.py:1 says 'Nobody': name the subject"),
        ("a = 'for whoever asks'", "x.py:1 says 'whoever': name the subject"),
    ],
)
def test_planted_riddles_are_caught(text: str, fault: str) -> None:
    """Modules, classes, fields, comments and texts are looked at."""
    assert prose_faults("x.py", text, list(ast.walk(ast.parse(text)))) == [fault]


@pytest.mark.parametrize(
    "text", ['"""Whole records."""', '"""Size; what counts."""', 'a = "What?"']
)
def test_plain_prose_passes(text: str) -> None:
    """Only the first word counts, and only in docstrings."""
    assert prose_faults("x.py", text, list(ast.walk(ast.parse(text)))) == []
