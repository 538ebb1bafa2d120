"""Fixtures of tests that kill."""

import random
from pathlib import Path

import pytest

from tests.sampling import SEED
from tests.spark.kills.harness import Killing


@pytest.fixture
def killing(tmp_path: Path) -> Killing:
    place = tmp_path / "kills"
    place.mkdir()
    return Killing(place, random.Random(SEED))
