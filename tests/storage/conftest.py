"""A disk in memory for each test."""

import pytest

from metaq.testing.fs import FaultyFileSystem


@pytest.fixture
def fs() -> FaultyFileSystem:
    return FaultyFileSystem()
