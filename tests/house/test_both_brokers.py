"""The client's tests run against both brokers, or say why not.

A test starts its brokers by the fixture `start_broker` (tests/conftest.py) or with a
kind that pytest was given (`BROKERS`), and so runs against each. What opens one kind of
broker by name stands in its module's table `ONE_BROKER`, with the reason: the test,
fixture or helper; of stand-ins that answer what the test says, the stand-in itself.
"""

import ast
from collections.abc import Mapping

import pytest

from tests.cases import for_each
from tests.house.tree import PROJECT

ROOMS = ("tests/client", "tests/cli")
ONE_KIND = frozenset(
    {"embedded_broker", "EmbeddedBroker", "running_broker", "make_config",
     "start_metaq_1_4", "FakeBroker", "PYTHON", "METAQ_1_4"}
)  # fmt: skip
STAND_INS = frozenset({"MemoryBroker", "ScriptedBroker"})
BOTH = frozenset({"start_broker", "BROKERS"})
TABLE = "ONE_BROKER"

MODULES = {
    PROJECT.rel(path): path.read_text()
    for room in ROOMS
    for path in sorted((PROJECT.root / room).glob("test_*.py"))
}


def table_of(tree: ast.Module) -> dict[str, str]:
    """Return a module's table, {} without one."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                if name == TABLE:
                    return dict(ast.literal_eval(value))
    return {}


def names_in(node: ast.AST) -> set[str]:
    """Return the names that are used, and those of arguments: pytest's fixtures."""
    nodes = list(ast.walk(node))
    used = {each.id for each in nodes if isinstance(each, ast.Name)}
    return used | {each.arg for each in nodes if isinstance(each, ast.arg)}


def openers_of(tree: ast.Module) -> Mapping[str, set[str]]:
    """Return each function and class at the top → the brokers that it names."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return {
        node.name: names & (ONE_KIND | STAND_INS)
        for node in tree.body
        if isinstance(node, kinds)
        and (names := names_in(node)) & (ONE_KIND | STAND_INS)
    }


def faults_of(text: str) -> list[str]:
    """Return what is wrong with a module of tests."""
    tree = ast.parse(text)
    table, openers = table_of(tree), openers_of(tree)
    wrong = [
        f"{name} is for {broker} alone: say why in {TABLE}"
        for name, brokers in openers.items()
        for broker in sorted(brokers)
        if name not in table and not (broker in STAND_INS and broker in table)
    ]
    known = openers.keys() | set().union(*openers.values())
    wrong += [f"{TABLE}: {name} opens no broker" for name in table.keys() - known]
    wrong += [f"{TABLE}: {name}: no reason" for name, why in table.items() if not why]
    return wrong


@pytest.mark.slow
@for_each("module", MODULES)
def test_client_tests_run_against_both_brokers_or_say_why_not(module: str) -> None:
    """A broker that is opened by name is one that the other kind is not tested with."""
    assert faults_of(MODULES[module]) == []


def test_many_tests_run_against_both() -> None:
    """The fixture is what most modules that talk to a broker use."""
    both = [m for m, text in MODULES.items() if any(name in text for name in BOTH)]
    assert len(both) > 20


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("def test_it(start_broker): start_broker()", []),
        (
            "def test_it():\n with FakeBroker(): ...",
            ["test_it is for FakeBroker alone: say why in ONE_BROKER"],
        ),
        (
            "ONE_BROKER = {'f': 'it fails'}\ndef f(start_metaq_1_4): ...",
            [],
        ),
        ("ONE_BROKER = {'MemoryBroker': 'cues'}\ndef f(): MemoryBroker()", []),
        (
            "ONE_BROKER = {'FakeBroker': 'all'}\ndef f(): FakeBroker()",
            ["f is for FakeBroker alone: say why in ONE_BROKER"],
        ),
        ("ONE_BROKER = {'gone': 'why'}", ["ONE_BROKER: gone opens no broker"]),
        (
            "ONE_BROKER = {'f': ''}\ndef f(): ScriptedBroker()",
            ["ONE_BROKER: f: no reason"],
        ),
    ],
)
def test_the_check_finds_what_it_is_for(text: str, faults: list[str]) -> None:
    """Planted modules, good and bad."""
    assert faults_of(text) == faults
