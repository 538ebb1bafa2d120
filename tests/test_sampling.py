"""Which tests a quick run leaves out: half of the twins, and no other."""

from itertools import product
from typing import Any

from tests.cases import for_each
from tests.sampling import twins_left_out

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
