"""The pytest fixture `metaq_broker`: a real broker for one test.

Enable it by `pytest_plugins = ["metaq.testing.pytest_plugin"]` in the conftest.py at
the root of the tests (docs/testing.md).
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from metaq.testing.embedded import EmbeddedBroker, embedded_broker


@pytest.fixture
def metaq_broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """Run a broker for one test, with one topic `test` of one partition.

    Its data is below the test's `tmp_path`, which pytest keeps for a while, so that
    a failed test can be examined.
    """
    with embedded_broker(data_path=tmp_path / "metaq") as broker:
        yield broker
