"""Tests use the seams of the code; where there is none, their number does not grow.

A test that reads what is private, or puts something else in the place of a function,
breaks with each change of the shape and not with the behaviour. `tests/rigs/inside.py`
has the ways into private parts that several tests share.
"""

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest

from tests.house.tree import PROJECT, Tree

# Ratchets: they may only shrink. What is left: parts of libraries (kazoo, PySpark,
# Delta, threads), locks and sleepers in a race that no other way shows; deaths, bugs
# and lack of memory in the middle of a function; calls that are counted because nothing
# else tells of them; and times that would be waited for behind a public object.
PRIVATE_LINES_MAX = 20
PATCHES_MAX = 114

INSIDE = "tests/rigs/inside.py"
PUBLIC = {"_replace", "_asdict", "_fields", "_exit"}
"""Names of the standard library that are public."""
OWN = {"self", "cls"}
PATCHES = {"setattr", "delattr", "object", "multiple"}
"""Methods of `monkeypatch`, and of `mock.patch`."""
SUSPECT = re.compile(
    r"\._(?<!\bself\._)(?<!\bcls\._)[a-zA-Z]"
    r"|^ *from metaq.*\b_[a-zA-Z]|^ +_[a-zA-Z]\w*(?: as \w+)?,$"
    r"|setattr|delattr|patch",
    re.MULTILINE,
)
"""In the text of each file that has a line of either kind. Few have: parsing all tests
takes longer than what is found in them. An expression that begins with letters, and
then looks back, is found ten times as fast.
"""


def private_lines(tree: Tree) -> list[str]:
    """Return the lines of tests that name something private of something else."""
    return [
        f"{tree.rel(path)}:{line}"
        for path in _tests(tree.root)
        for line in sorted({n.lineno for n in tree.nodes(path) if _is_private(n)})
    ]


def patches(tree: Tree) -> list[str]:
    """Return the places where tests put something in the place of an attribute."""
    return [
        f"{tree.rel(path)}:{node.lineno}"
        for path in _tests(tree.root)
        for node in tree.nodes(path)
        if isinstance(node, ast.Call) and _is_patch(node.func)
    ]


@lru_cache(maxsize=1)
def _tests(root: Path) -> list[Path]:
    return [
        path
        for path in sorted((root / "tests").rglob("*.py"))
        if path != root / INSIDE and SUSPECT.search(path.read_text())
    ]


def _is_private(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        is_ours = (node.module or "").split(".")[0] == "metaq"
        return is_ours and any(_has_private_name(name.name) for name in node.names)
    if not isinstance(node, ast.Attribute) or not _has_private_name(node.attr):
        return False
    owner = node.value
    is_super = isinstance(owner, ast.Call) and ast.unparse(owner.func) == "super"
    return not is_super and not (isinstance(owner, ast.Name) and owner.id in OWN)


def _has_private_name(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def _is_patch(function: ast.expr) -> bool:
    if not isinstance(function, ast.Attribute):
        return False
    if function.attr in {"object", "multiple"}:
        return ast.unparse(function.value).endswith("patch")
    return function.attr in PATCHES or ast.unparse(function) == "mock.patch"


@pytest.mark.slow
def test_what_tests_read_of_private_parts_does_not_grow() -> None:
    """A public counter, statistics or the behaviour itself is there in most cases."""
    found = private_lines(PROJECT)
    assert len(found) <= PRIVATE_LINES_MAX, "\n".join(found)


@pytest.mark.slow
def test_what_tests_patch_does_not_grow() -> None:
    """A bound is an argument; clocks, disks, networks and ZooKeeper have their rigs."""
    found = patches(PROJECT)
    assert len(found) <= PATCHES_MAX, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "from metaq.zk import _connection, session",
        "from metaq.zk import (\n    session,\n    _connection as link,\n)",
        "thing._name = thing.__name__",
        "thing()\\\n._name()",
        "myself._name = 1",
    ],
)
def test_a_private_part_is_found(tmp_path: Path, line: str) -> None:
    tree = planted(tmp_path, line)
    assert [one.partition(":")[0] for one in private_lines(tree)] == ["tests/a.py"]
    assert patches(tree) == []


@pytest.mark.parametrize(
    "line",
    [
        "monkeypatch.setattr(thing, 'NAME', 1)",
        "monkeypatch.delattr(thing, 'NAME')",
        "mock.patch.object(thing, 'name')",
        "mock.patch.multiple(thing, name=1)",
        "mock.patch('a.b')",
    ],
)
def test_a_patch_is_found(tmp_path: Path, line: str) -> None:
    tree = planted(tmp_path, line)
    assert patches(tree) == ["tests/a.py:1"]
    assert private_lines(tree) == []


@pytest.mark.parametrize(
    "line",
    [
        "self._own = super()._own",
        "pair._replace(a=1)",
        "setattr(broker, 'delay_s', 1)",
        "patch.dict(NAMES)",
    ],
)
def test_names_that_look_like_it_are_neither(tmp_path: Path, line: str) -> None:
    tree = planted(tmp_path, line)
    assert private_lines(tree) == patches(tree) == []


def planted(path: Path, line: str) -> Tree:
    """Return a tree with one test, of this line."""
    (path / "metaq").mkdir()
    (path / "tests").mkdir()
    (path / "tests" / "a.py").write_text(line + "\n")
    return Tree(path)
