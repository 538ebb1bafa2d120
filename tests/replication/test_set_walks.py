"""Seeded walks over three brokers: networks, disks, loops and ZooKeeper all fail."""

from pathlib import Path

import pytest

from tests.replication.set_walk import Walk, direct, run_walk
from tests.sampling import IS_WHOLE, SEED

pytestmark = pytest.mark.timeout(400)

WALKS = range(SEED, SEED + (20 if IS_WHOLE else 3))


@pytest.mark.parametrize("seed", WALKS)
def test_nothing_that_was_promised_is_lost_on_a_walk(seed: int, tmp_path: Path) -> None:
    """And the set is well some time after the last fault."""

    async def act(walk: Walk) -> None:
        # Without power cuts also the numbers of batches are remembered.
        await direct(walk, length_s=8.0, has_power=seed % 2 == 0)

    run_walk(seed, tmp_path, act)
