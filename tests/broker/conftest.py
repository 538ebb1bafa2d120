"""Fixtures of the broker's tests."""

import pytest

from tests.rigs.fs import FaultyFileSystem


@pytest.fixture
def fs(monkeypatch: pytest.MonkeyPatch) -> FaultyFileSystem:
    """A disk in memory; the admin socket, which needs a real one, stays away."""

    async def nothing(_self: object) -> None:
        return None

    monkeypatch.setattr("metaq.broker.admin.AdminServer.on_start", nothing)
    return FaultyFileSystem()
