"""Tests of the harness for drivers that may be killed."""

import os
import threading
from pathlib import Path

import pytest

from tests.spark.kills.driver import ANSWER
from tests.spark.kills.harness import MASTER, Driver, DriverDied
from tests.spark.kills.steps import DIRECTORY, DRIVER_GROUP


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


def test_the_driver_that_is_asked_is_the_one_to_be_killed(tmp_path: Path) -> None:
    """Of those that share a directory; not the one that was started last."""
    script = tmp_path / "driver"
    script.write_text(
        f"""#!/bin/sh
echo '{ANSWER}{{}}'
while read -r _
do printf '{ANSWER}{{"done": [%s, %s]}}\\n' $$ "$(cat "${DIRECTORY}/{DRIVER_GROUP}")"
done
"""
    )
    script.chmod(0o700)
    drivers = [Driver(tmp_path, master, python=str(script)) for master in "ab"]
    try:
        for each in drivers:
            own, to_kill = each.ask("x")["done"]
            assert own == to_kill
    finally:
        for each in drivers:
            each.close()
