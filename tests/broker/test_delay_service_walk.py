"""Random walks over the delay service: kills, power cuts, clock jumps, a full disk."""

import asyncio
import random

from tests.broker.delay_walk import DelayWalk
from tests.sampling import examples


def test_each_message_arrives_once_and_not_early(rng: random.Random) -> None:
    """Whatever happens to disk, clock and partitions."""
    for _ in range(examples(50)):
        asyncio.run(DelayWalk(rng.randrange(1 << 32)).play(120))
