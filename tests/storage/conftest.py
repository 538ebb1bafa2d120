"""A disk in memory for each test."""

import pytest

from tests.rigs.fs import FaultyFileSystem


@pytest.fixture
def fs() -> FaultyFileSystem:
    """Return a disk whose groups are all the storage thread's."""
    return FaultyFileSystem(has_syncs=False)
