"""Syntax trees are there for the tests of the house, and no longer."""

import gc
from collections.abc import Iterator

import pytest

from tests.house.tree import PROJECT


@pytest.fixture(scope="package", autouse=True)
def _trees_end_with_the_tests() -> Iterator[None]:
    # A million nodes are made, and none of them is garbage before.
    gc.disable()
    yield
    PROJECT.forget()
    gc.enable()
