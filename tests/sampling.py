"""Sample of the possible cases for one run: a choice by the seed, or all of them.

Tests of one function that is marked `sampled(count)` are a matrix: one run has `count`
of its cells, other seeds have others. METAQ_WHOLE=1 runs all of them. In other runs
properties try fewer examples, and a quarter of the moments at which a crash may come or
a call may fail are tried, each call with one error.
"""

import os
import random
import secrets
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
"""Properties try half as many examples as else."""

T = TypeVar("T")


def sample(cells: Sequence[T], count: int, rng: random.Random) -> list[T]:
    """Return `count` of the cells in any order, all of them in a whole run."""
    size = len(cells) if IS_WHOLE else min(count, len(cells))
    return rng.sample(cells, size)


def quarter(cells: Sequence[T], rng: random.Random) -> list[T]:
    """Return a quarter of the cells in any order, all of them in a whole run."""
    return sample(cells, -(-len(cells) // 4), rng)


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


def unchosen(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return the cells of sampled matrices that this run leaves out."""
    matrices: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            name = item.nodeid.partition("[")[0]
            matrices.setdefault(name, []).append(item)
    left = set()
    for name, cells in matrices.items():
        mark = cells[0].get_closest_marker("sampled")
        assert mark is not None
        rng = random.Random(f"{SEED}: {name}")
        left |= {*cells} - {*sample(cells, *mark.args, rng)}
    return left
