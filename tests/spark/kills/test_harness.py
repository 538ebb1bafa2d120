"""Tests of the harness for drivers that may be killed."""

import os
import threading
from pathlib import Path

import pytest

from tests.spark.kills.harness import MASTER, Driver, DriverDied


def test_a_driver_that_does_not_start_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    """Neither its process nor the thread that reads its answers."""
    number = tmp_path / "number"
    script = tmp_path / "no_driver"
    script.write_text(f"#!/bin/sh\necho $$ > {number}\nexec sleep 600 >&-\n")
    script.chmod(0o700)
    before = set(threading.enumerate())
    with pytest.raises(DriverDied):
        Driver(tmp_path, MASTER, python=str(script))
    with pytest.raises(ProcessLookupError):
        os.kill(int(number.read_text()), 0)
    assert set(threading.enumerate()) <= before
