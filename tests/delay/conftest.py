"""A disk in memory for the index."""

import pytest

from tests.rigs.fs import FaultyFileSystem


@pytest.fixture
def fs() -> FaultyFileSystem:
    """Return an empty disk."""
    return FaultyFileSystem()
