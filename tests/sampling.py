"""Sample of the possible cases for one run: a choice by the seed, or all of them.

Tests of one function that is marked `sampled(count)` are a matrix: one run has `count`
of its cells, other seeds have others. METAQ_WHOLE=1 runs all of them. In other runs
properties try fewer examples, and a quarter of the moments at which a crash may come or
a call may fail are tried, each call with one error. METAQ_QUICK=1 halves examples and
moments once more, and runs one of two tests that differ in nothing but broker or world;
files that are slow as a whole, or need a server, are not even imported.
"""

import os
import random
import re
import secrets
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import TypeVar

import pytest

SEED = int(os.environ.get("METAQ_SEED") or secrets.randbits(32))
"""One number for every random choice of the run; METAQ_SEED repeats a run."""
# Processes that run tests for this one make the same choices.
os.environ["METAQ_SEED"] = str(SEED)

IS_WHOLE = bool(os.environ.get("METAQ_WHOLE"))
"""Everything is tried, however long it takes."""

IS_QUICK = bool(os.environ.get("METAQ_QUICK"))
"""Half as many examples and moments are tried as else, and half of the twins run."""

TWIN_WORDS = {"metaq-python": 0, "metaq-1.4": 1, "sync": 0, "async": 1}
"""Values of a parameter that tell twins apart: kind of broker, world of the client."""
_TWIN_WORD = re.compile(rf"(?<=[\[-])({'|'.join(map(re.escape, TWIN_WORDS))})(?=[-\]])")

QUICK_OMITS = ("slow", "crash", "zookeeper", "spark", "java")
"""Marks of tests that a quick run leaves out: `-m` of scripts/test."""
_OMITTED_FILE = re.compile(
    rf"^pytestmark = (?:\[[^\]]*|.*)\bpytest\.mark\.(?:{'|'.join(QUICK_OMITS)})\b",
    re.MULTILINE,
)

T = TypeVar("T")


def sample(cells: Sequence[T], count: int, rng: random.Random) -> list[T]:
    """Return `count` of the cells in any order, all of them in a whole run."""
    size = len(cells) if IS_WHOLE else min(count, len(cells))
    return rng.sample(cells, size)


def quarter(cells: Sequence[T], rng: random.Random) -> list[T]:
    """Return a quarter of the cells in any order, all of them in a whole run.

    In a quick run it is half of that.
    """
    return sample(cells, -(-len(cells) // (8 if IS_QUICK else 4)), rng)


def examples(count: int) -> int:
    """Return how many examples a property tries in this run that has so many in all."""
    if IS_WHOLE:
        return count
    return -(-count // 5) if IS_QUICK else -(-count * 2 // 5)


def failures(call_count: int, errors: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the calls that are to fail, from 1, and the error number of each.

    A quarter of the calls fail, the errors taking turns; in a whole run all with each.
    """
    rng = random.Random(SEED)
    calls = quarter(range(1, call_count + 1), rng)
    turns = cycle(rng.sample(errors, len(errors)))
    for number in sorted(calls):
        for error in errors if IS_WHOLE else [next(turns)]:
            yield number, error


def is_omitted(text: str) -> bool:
    """Return True for the text of a test file of which a quick run has nothing."""
    return bool(_OMITTED_FILE.search(text))


def unchosen(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return the cells of sampled matrices that this run leaves out."""
    matrices: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            name = item.nodeid.partition("[")[0]
            matrices.setdefault(name, []).append(item)
    left = twins_left_out(items) if IS_QUICK else set()
    for name, cells in matrices.items():
        mark = cells[0].get_closest_marker("sampled")
        assert mark is not None
        rng = random.Random(f"{SEED}: {name}")
        left |= {*cells} - {*sample(cells, mark.args[0], rng)}
    return left


def twins_left_out(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return half of the tests that differ in nothing but broker or world.

    Of a broker and a world crossed, each broker and each world is left. The sets of
    twins of a function take turns: one has the real broker, the next MetaQ 1.4.
    """
    families: dict[str, dict[str, list[pytest.Item]]] = {}
    for item in items:
        function, _, cell = item.nodeid.partition("[")
        rest, count = _TWIN_WORD.subn("*", f"[{cell}")
        if count:
            families.setdefault(function, {}).setdefault(rest, []).append(item)
    left = set()
    for function, sets in families.items():
        first = random.Random(f"{SEED}: {function}").randrange(2)
        for turn, twins in enumerate(sets.values(), first):
            halves: dict[int, list[pytest.Item]] = defaultdict(list)
            for item in twins:
                words = _TWIN_WORD.findall(item.nodeid)
                halves[sum(TWIN_WORDS[word] for word in words) % 2].append(item)
            if len(halves) == 2:
                left |= {*halves[turn % 2]}
    return left
