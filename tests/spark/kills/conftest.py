"""Drivers for all tests that kill, and orders to kill."""

import random
from collections.abc import Iterator

import pytest

from tests.sampling import SEED
from tests.spark.kills.harness import Drivers, Killing


@pytest.fixture(scope="session")
def victims(tmp_path_factory: pytest.TempPathFactory) -> Killing:
    """Return the one who numbers all orders: processes know a single directory."""
    return Killing(tmp_path_factory.mktemp("kills"), random.Random(SEED))


@pytest.fixture(scope="session")
def drivers(victims: Killing) -> Iterator[Drivers]:
    found = Drivers(victims.directory)
    yield found
    found.close()


@pytest.fixture
def killing(victims: Killing) -> Iterator[Killing]:
    """Give orders by the seed, next to any other tests; none is left over."""
    victims.rng = random.Random(SEED)
    yield victims
    for order in victims.directory.glob("order*.json"):
        order.unlink()
