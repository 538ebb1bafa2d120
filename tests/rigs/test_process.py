"""A broker as a child process: what a start that fails leaves its starter with."""

from pathlib import Path

import pytest

from tests.rigs.process import BrokerProcess

pytestmark = pytest.mark.slow


def test_a_start_that_fails_tells_what_the_broker_said(tmp_path: Path) -> None:
    """The error is the log, not a time-out."""
    with BrokerProcess(tmp_path / "data", topic="t") as broker:
        twin = BrokerProcess(tmp_path / "data", topic="t")
        with pytest.raises(RuntimeError, match="is in use"):
            twin.start()
        assert broker.stop() == 0
