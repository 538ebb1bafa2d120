"""Rooms look alike: one name for loggers, tests by module, documented exports."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.house.test_public_api import Function, is_overload, public_names
from tests.house.tree import PROJECT, Tree

# Besides the names of `metaq.client`: what users import by the path of its module.
USER_NAMES = {
    "client.browsing": {"AsyncBrowsing"},
    "pipeline.decode": {"avro", "csv", "dead_letters", "json", "pattern"},
    "pipeline.jobs.archive": {"archive"},
    "pipeline.jobs.archive_store": {"read_archive"},
    "pipeline.jobs.audit": {"audit_archive"},
    "testing.clock": {"ManualClock"},
    "testing.embedded": {"embedded_broker"},
    "testing.fake_broker": {"FakeBroker", "Faults"},
    "testing.proxy": {"Proxy"},
    "testing.zk": {"MemoryZooKeeper"},
}
CLIENT = "client.public"
SECTION = re.compile(r"^ *(Args|Returns|Yields|Raises):$", re.MULTILINE)
REFERENCE = re.compile(r"(?:see|those of) `(\w+\.\w+)`")


def logger_faults(tree: Tree) -> list[str]:
    """Name each logger of a module that is not called `_log`."""
    faults = []
    for path in tree.sources:
        for node in tree.nodes(path):
            if (
                isinstance(node, ast.Assign)
                and ast.unparse(node.value) == "logging.getLogger(__name__)"
                and ast.unparse(node.targets[0]) != "_log"
            ):
                name = ast.unparse(node.targets[0])
                faults.append(f"{tree.rel(path)} calls its logger {name}, not _log")
    return faults


def declares_only(module: ast.AST) -> bool:
    """Return whether the module has types, constants and protocols alone.

    Its functions have one statement at most: a field under another name, a text.
    """
    functions = [node for node in ast.walk(module) if isinstance(node, Function)]
    return all(len(n.body) <= 1 + bool(ast.get_docstring(n)) for n in functions)


def test_file_faults(tree: Tree) -> list[str]:
    """Name each module X of a room without a file `test_X*.py` in the tests of it.

    Exempt are `__init__` and `__main__`, and modules that only declare.
    """
    faults = []
    for path in tree.sources:
        parts = path.relative_to(tree.root / "metaq").parts
        if path.stem.startswith("__") or declares_only(tree.nodes(path)[0]):
            continue
        tests = tree.root.joinpath("tests", *parts[:-1][:1])
        wanted = f"test_{path.stem.lstrip('_')}*.py"
        if not any(tests.rglob(wanted) if parts[1:] else tests.glob(wanted)):
            faults.append(f"{tree.rel(path)} has no {tests.name}/**/{wanted}")
    return faults


test_file_faults.__test__ = False  # type: ignore[attr-defined]  # a law, not a test


def exported(tree: Tree) -> Iterator[tuple[str, str, Function]]:
    """Yield (file, dotted name, function) of all that users can call."""
    names = {module: set(found) for module, found in USER_NAMES.items()}
    for node in tree.nodes(tree.modules[CLIENT]) if CLIENT in tree.modules else []:
        if isinstance(node, ast.ImportFrom) and node.module:
            kept = names.setdefault(node.module.removeprefix("metaq."), set())
            kept |= {alias.name for alias in node.names}
    for module in names.keys() & tree.modules.keys():
        path = tree.modules[module]
        root = tree.nodes(path)[0]
        assert isinstance(root, ast.Module)
        for name, node, _ in public_names(root.body):
            is_named = name.partition(".")[0] in names[module]
            if is_named and isinstance(node, Function) and not is_overload(node):
                yield tree.rel(path), name, node


def section_faults(tree: Tree) -> list[str]:
    """Name each exported function whose docstring lacks Args, Returns or Raises.

    One that says "see `AsyncProducer.send`" has the sections of that one as well.
    """
    functions = sorted(exported(tree), key=lambda each: each[:2])
    nodes = {name: node for _, name, node in functions}

    def found_in(name: str, citing: frozenset[str] = frozenset()) -> set[str]:
        if name not in nodes or name in citing:
            return set()
        cited = REFERENCE.findall(ast.get_docstring(nodes[name]) or "")
        others = (found_in(each, citing | {name}) for each in cited)
        return found_sections(nodes[name]).union(*others)

    return [
        f"{file}: {name} has no {section}"
        for file, name, node in functions
        for section in sorted(wanted_sections(node) - found_in(name))
    ]


def wanted_sections(node: Function) -> set[str]:
    arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
    count = sum(each.arg not in {"self", "cls"} for each in arguments)
    # One argument is what the sentence is about.
    wanted = {"Args"} if count > 1 else set()
    if any(isinstance(each, ast.Raise) and each.exc for each in own_nodes(node)):
        wanted.add("Raises")
    nothing = {"None", "NoReturn", "Never", "Self"}
    if count and ast.unparse(node.returns or node) not in nothing:
        wanted.add("Returns")
    return wanted


def found_sections(node: Function) -> set[str]:
    text = ast.get_docstring(node) or ""
    found = set(SECTION.findall(text))
    # A sentence is enough where it is about nothing else.
    first = {"Return", "Yield", "Iterate"} & {text.partition(" ")[0]}
    return found | {"Returns"} if first or "Yields" in found else found


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of functions inside it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Function | ast.Lambda):
            yield child
            yield from own_nodes(child)


@pytest.mark.slow
def test_loggers_have_one_name() -> None:
    """A module that logs has `_log = logging.getLogger(__name__)`."""
    assert logger_faults(PROJECT) == []


@pytest.mark.slow
def test_tests_are_found_by_the_name_of_the_module() -> None:
    """The tests of metaq/storage/walk.py begin in tests/storage/test_walk.py."""
    assert test_file_faults(PROJECT) == []


def test_exported_names_say_what_they_take_return_and_raise() -> None:
    """Users read Args, Returns and Raises in the docstrings of what they import."""
    assert section_faults(PROJECT) == []
