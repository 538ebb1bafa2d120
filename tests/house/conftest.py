"""Syntax trees are there for the tests of the house, and no longer."""

from collections.abc import Iterator

import pytest

from tests.house.tree import PROJECT


@pytest.fixture(scope="package", autouse=True)
def _trees_end_with_the_tests() -> Iterator[None]:
    yield
    PROJECT.forget()
