"""Environment of an update; without Spark."""

import os

import pytest

from metaq.pipeline.declared.updates import CONNECT_MODE, connect_mode

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("before", [None, "0"])
def test_connect_mode_is_as_it_was_behind_an_update(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who has set it finds it set."""
    monkeypatch.delenv(CONNECT_MODE, raising=False)
    if before is not None:
        monkeypatch.setenv(CONNECT_MODE, before)
    with connect_mode():
        assert os.environ[CONNECT_MODE] == "1"
    assert os.environ.get(CONNECT_MODE) == before
