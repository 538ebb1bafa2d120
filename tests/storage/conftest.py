"""A disk in memory for each test."""

import pytest

from tests.rigs.fs import FaultyFileSystem


@pytest.fixture
def fs() -> FaultyFileSystem:
    return FaultyFileSystem()
