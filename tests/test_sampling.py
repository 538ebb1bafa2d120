"""Which tests a quick run leaves out: half of the twins, and what is marked so."""

from itertools import product
from pathlib import Path
from typing import Any

from tests.cases import for_each
from tests.sampling import QUICK_OMITS, is_omitted, twins_left_out

ROOT = Path(__file__).parents[1]

BROKERS = ("metaq-python", "metaq-1.4")
WORLDS = ("sync", "async")


class Item:
    def __init__(self, nodeid: str) -> None:
        self.nodeid = nodeid


def kept(*names: str) -> list[str]:
    items: list[Any] = [Item(name) for name in names]
    left_out = twins_left_out(items)
    return [item.nodeid for item in items if item not in left_out]


def test_one_of_two_twins_is_kept() -> None:
    """They differ in the kind of broker, or in the world."""
    assert len(kept(*(f"t[{kind}]" for kind in BROKERS))) == 1
    assert len(kept(*(f"t[{world}-3]" for world in WORLDS))) == 1


def test_of_brokers_and_worlds_each_is_kept() -> None:
    """Two of four, and no broker or world twice."""
    names = kept(*(f"t[{w}-{kind}]" for w, kind in product(WORLDS, BROKERS)))
    assert len(names) == 2
    for word in (*BROKERS, *WORLDS):
        assert sum(f"[{word}-" in name or f"-{word}]" in name for name in names) == 1


def test_cases_of_a_function_take_turns() -> None:
    """Both brokers are met where there is more than one case."""
    names = kept(*(f"t[{kind}-{n}]" for n, kind in product(range(4), BROKERS)))
    assert [name[-2] for name in names] == ["0", "1", "2", "3"]
    assert {name[:-3] for name in names[::2]} != {name[:-3] for name in names[1::2]}


@for_each(
    "names",
    [
        ("t", "u", "t[1]", "t[2]"),
        ("t[metaq-1.4]", "u[metaq-python]", "t[sync-1]", "t[async-2]"),
        ("t[asynchronous]", "t[synchronous]", "t[a sync]", "t[an async]"),
    ],
)
def test_a_test_without_a_twin_is_kept(names: tuple[str, ...]) -> None:
    """One whose twin is slow, or that was asked for alone."""
    assert kept(*names) == [*names]


@for_each(
    "text",
    [
        "pytestmark = pytest.mark.slow\n",
        "import pytest\n\npytestmark = [pytest.mark.timeout(9), pytest.mark.spark]\n",
        "pytestmark = [\n    pytest.mark.timeout(9),\n    pytest.mark.java,\n]\n",
    ],
)
def test_a_file_that_is_marked_as_a_whole_is_not_imported(text: str) -> None:
    """One mark of those is enough."""
    assert is_omitted(text)


@for_each(
    "text",
    [
        "@pytest.mark.slow\ndef test_one() -> None: ...\n",
        "pytestmark = pytest.mark.timeout(9)\n\n@pytest.mark.slow\ndef ...\n",
        "pytestmark = [pytest.mark.timeout(9)]\n\n@pytest.mark.slow\ndef ...\n",
        "pytestmark = pytest.mark.slowly\n",
        "# pytestmark = pytest.mark.slow\n",
    ],
)
def test_a_file_with_a_test_that_is_quick_is_imported(text: str) -> None:
    """Its other tests are left out one by one."""
    assert not is_omitted(text)


def test_marks_are_those_of_the_command() -> None:
    """A test that is not imported would not run."""
    asked_for = f'-m "not ({" or ".join(QUICK_OMITS)})"'
    assert asked_for in (ROOT / "scripts" / "test").read_text()
