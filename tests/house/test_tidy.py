"""Sizes, banned calls, leftovers and dead files; ratchets only tighten."""

import ast
import re
from pathlib import Path

import pytest

from tests.house.tree import PROJECT, Tree

# A wall, not a law that splits files: about 500 lines are comfortable, and a file has
# one subject. Tests have none: those of one subject stay together.
FILE_LINES_MAX = 800
FUNCTION_LINES_MAX = 70
# Functions longer than the wall, with the length they have now. Entries may only
# shrink or go: "file:function": lines.
GRANDFATHERED: dict[str, int] = {}

# Where the world comes in; all others receive it as an argument.
CLOCK = {"metaq/clock.py"}
# app hands it to the topics; the others make names of their own
CHANCE = {
    "metaq/retry.py", "metaq/broker/app.py", "metaq/client/session.py",
    "metaq/spark/sink/writer.py", "metaq/spark/sink/outbox.py",
    "metaq/storage/inventory.py", "metaq/pipeline/jobs/day_files.py",
    "metaq/pipeline/declared/updates.py", "metaq/replication/tables.py",
    "metaq/replication/node.py", "metaq/zk/coordinator.py",
}  # fmt: skip
DISK = {"metaq/fs/calls.py"}
EXEMPT_ROOMS = (
    "metaq/testing/", "metaq/cli/", "metaq/zk/embedded.py",
    # a new project of a user, and the log of a Java process
    "metaq/pipeline/declared/scaffold.py", "metaq/pipeline/jobs/session.py",
)  # fmt: skip

MODULE_DOORS = {
    "time": CLOCK,
    "random": CHANCE,
    "secrets": CHANCE,
    "uuid": CHANCE,
    "fcntl": DISK,
    "mmap": DISK,
    "shutil": DISK,
    "tempfile": DISK,
}
OS_FILE_CALLS = {
    "fdatasync", "fsync", "ftruncate", "link", "listdir", "makedirs", "mkdir", "open",
    "posix_fallocate", "pread", "preadv", "pwrite", "pwritev", "remove", "removedirs",
    "rename", "renames", "replace", "rmdir", "scandir", "symlink", "sync", "truncate",
    "unlink", "writev",
}  # fmt: skip
CALL_DOORS = {
    "open": DISK,
    "io.open": DISK,
    "os.urandom": CHANCE,
    "datetime.now": CLOCK,
    "datetime.utcnow": CLOCK,
    "datetime.today": CLOCK,
    "datetime.datetime.now": CLOCK,
    "datetime.datetime.utcnow": CLOCK,
    "date.today": CLOCK,
    "datetime.date.today": CLOCK,
    **{f"os.{name}": DISK for name in OS_FILE_CALLS},
}
# Methods that only paths have, so that the receiver need not be known.
PATH_CALLS = {"read_bytes", "read_text", "write_bytes", "write_text", "touch"}


# How a line of the log names what it is about, behind what happened and a colon.
LOG_FIELD = re.compile(r"\b\w+=\[?%")
LOG_CALL = re.compile(
    r"_?log\.(debug|info|warning|error|exception|critical|log)", re.ASCII
)
# The common words are there before their first speaker.
NEVER_DEAD = {"model", "clock", "errors"}


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return "?"


def file_size_faults(tree: Tree) -> list[str]:
    lengths = {
        tree.rel(path): len(path.read_text().splitlines()) for path in tree.sources
    }
    return [
        f"{name} has {lines} lines, the wall is {FILE_LINES_MAX}"
        for name, lines in lengths.items()
        if lines > FILE_LINES_MAX
    ]


def function_size_faults(tree: Tree) -> list[str]:
    faults = []
    for path in tree.sources:
        for node in tree.nodes(path):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if ast.get_docstring(node, clean=False) is not None:
                doc = node.body[0]
                lines -= (doc.end_lineno or doc.lineno) - doc.lineno + 1
            name = f"{tree.rel(path)}:{node.name}"
            limit = GRANDFATHERED.get(name, FUNCTION_LINES_MAX)
            if lines > limit:
                faults.append(f"{name} has {lines} lines, the wall is {limit}")
    return faults


def door_faults(tree: Tree) -> list[str]:
    faults = []
    for path in tree.sources:
        name = tree.rel(path)
        if name.startswith(EXEMPT_ROOMS):
            continue
        for node in tree.nodes(path):
            for used, rooms in uses(node):
                if name not in rooms:
                    faults.append(f"{name} uses {used}")
    return faults


def uses(node: ast.AST) -> list[tuple[str, set[str]]]:
    """Return what the node takes from the world, with the rooms where it may."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
        return [(name, MODULE_DOORS[name]) for name in names if name in MODULE_DOORS]
    if isinstance(node, ast.ImportFrom):
        module = node.module or ""
        if module in MODULE_DOORS:
            return [(module, MODULE_DOORS[module])]
        full = [f"{module}.{alias.name}" for alias in node.names]
        return [(f, CALL_DOORS[f]) for f in full if f in CALL_DOORS]
    if isinstance(node, ast.Call):
        called = dotted(node.func)
        if called in CALL_DOORS:
            return [(called, CALL_DOORS[called])]
        method = called.rpartition(".")[2]
        on_path = isinstance(node.func, ast.Attribute) and isinstance(
            node.func.value, ast.Call
        )
        if on_path and method == "open" and receiver_is_path(node.func):
            return [("Path.open", DISK)]
        if isinstance(node.func, ast.Attribute) and method in PATH_CALLS:
            return [(called, DISK)]
    return []


def receiver_is_path(func: ast.expr) -> bool:
    assert isinstance(func, ast.Attribute)
    receiver = func.value
    return isinstance(receiver, ast.Call) and dotted(receiver.func).endswith("Path")


def leftover_faults(tree: Tree) -> list[str]:
    faults = []
    # Written so that this file does not accuse itself, and begins with letters: fast.
    words = "TO[D]O", "FIX[M]E", r"X[X]X(?!\()"
    reminder = re.compile("|".join(rf"{word}\b(?<=\b{word})" for word in words))
    for path in tree.sources + tree.others:
        name, text = tree.rel(path), path.read_text()
        if found := reminder.search(text):
            faults.append(f"{name}: {found[0]} without (issue)")
    # Elsewhere the linter finds breakpoints, and anything may print.
    for path in tree.sources:
        name = tree.rel(path)
        may_print = name.startswith("metaq/cli/")
        for node in tree.nodes(path):
            called = dotted(node.func) if isinstance(node, ast.Call) else ""
            if called in {"breakpoint", "pdb.set_trace"}:
                faults.append(f"{name}: {called}")
            if called in {"print", "sys.stdout.write"} and not may_print:
                faults.append(f"{name}: {called}")
    return faults


def log_faults(tree: Tree) -> list[str]:
    faults = []
    for path in tree.sources:
        for node in tree.nodes(path):
            if not isinstance(node, ast.Call) or not LOG_CALL.fullmatch(
                dotted(node.func)
            ):
                continue
            texts = [
                each.value
                for each in node.args[:2]
                if isinstance(each, ast.Constant) and isinstance(each.value, str)
            ]
            field = LOG_FIELD.search(texts[0]) if texts else None
            if field and not texts[0][: field.start()].endswith(": "):
                faults.append(f"{tree.rel(path)}:{node.lineno}: {texts[0]!r}")
    return faults


def silencer_faults(tree: Tree) -> list[str]:
    faults = []
    ignore = re.compile(r"type: ignore\[[\w, -]+\]  # \S")
    noqa = re.compile(r"noqa: [A-Z]+\d+(, ?[A-Z]+\d+)*  ?# ?\S")
    for path in tree.sources:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if "type: ignore" in line and not ignore.search(line):
                faults.append(f"{tree.rel(path)}:{number}: type: ignore, no reason")
            if "noqa" in line and not noqa.search(line):
                faults.append(f"{tree.rel(path)}:{number}: noqa, no reason")
    return faults


def doubled_name_faults(tree: Tree) -> list[str]:
    places: dict[str, list[str]] = {}
    for path in tree.sources:
        module = tree.nodes(path)[0]
        assert isinstance(module, ast.Module)
        for node in module.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(tree.rel(path))
    return [
        f"class {name} is in {' and in '.join(found)}"
        for name, found in places.items()
        if len(found) > 1
    ]


def dead_file_faults(tree: Tree) -> list[str]:
    dead = {
        name: path
        for name, path in tree.modules.items()
        if path.name not in {"__init__.py", "__main__.py"} and name not in NEVER_DEAD
    }
    for path in tree.sources + tree.others:
        text = path.read_text()
        if any(name.rpartition(".")[2] in text for name in dead):
            for item in tree.imports_of_file(path):
                dead.pop(item.own or "", None)
    return [
        f"{tree.rel(path)} is not imported, not even by a test"
        for path in dead.values()
    ]


def test_files_are_short() -> None:
    """A file has one subject: 800 lines are the wall."""
    assert file_size_faults(PROJECT) == []


@pytest.mark.slow
def test_lines_of_the_log_have_one_form() -> None:
    """`what happened: key=value key=value`, so that they can be taken apart."""
    assert log_faults(PROJECT) == []


@pytest.mark.slow
def test_functions_are_short() -> None:
    """A function has one idea: 70 lines are the wall, docstring not counted."""
    assert function_size_faults(PROJECT) == []


@pytest.mark.slow
def test_ratchets_name_functions_that_are_still_there() -> None:
    """An entry of the ratchet goes when its function does."""
    there = {
        f"{PROJECT.rel(path)}:{node.name}"
        for path in PROJECT.sources
        for node in PROJECT.nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert set(GRANDFATHERED) <= there


@pytest.mark.slow
def test_time_chance_and_files_come_through_the_door() -> None:
    """Clocks, random numbers and files are used in the modules that own them."""
    assert door_faults(PROJECT) == []


@pytest.mark.slow
def test_no_bare_reminders_or_leftovers() -> None:
    """Debt is written with its issue; debugging leftovers do not stay."""
    assert leftover_faults(PROJECT) == []


def test_every_silencer_gives_a_reason() -> None:
    """`type: ignore` and `noqa` carry their code and a reason."""
    assert silencer_faults(PROJECT) == []


def test_no_two_public_classes_have_one_name() -> None:
    """The name of a class says which one is meant."""
    assert doubled_name_faults(PROJECT) == []


@pytest.mark.slow
def test_there_are_no_dead_files() -> None:
    """Every module is imported by the product, a test or a benchmark."""
    assert dead_file_faults(PROJECT) == []


def test_directories_with_sources_are_packages() -> None:
    """A directory without `__init__.py` would be left out of types and wheels."""
    rooms = {path.parent for path in PROJECT.sources}
    assert [r for r in sorted(rooms) if not (Path(r) / "__init__.py").exists()] == []
