"""Random walks over the delay service: kills, power cuts, clock jumps, a full disk."""

import asyncio
import random
from collections.abc import Sequence

import pytest

from metaq.broker.joined_appends import JoinedBatch, JoinedRecord
from metaq.delay.plan import TICK_MS, DueRecord, Progress
from metaq.delay.records import DelayState
from tests.broker.delay_rig import SteppedDelays
from tests.broker.delay_walk import DelayWalk
from tests.sampling import examples

FOUND_WITHIN = 100
"""Walks in which a broken rule is found; each finds it with a chance above a tenth."""


class ProgressBeside(SteppedDelays):
    """Notes how far delivery is after the messages, in a transaction of its own."""

    last = DelayState()

    async def commit(
        self, appends: Sequence[JoinedRecord | JoinedBatch], state: DelayState
    ) -> None:
        await super().commit(appends, self.last)
        await super().commit([], state)
        self.last = state


class EarlyTick(SteppedDelays):
    """Takes what will be due with the next tick."""

    def take(self, now_ms: int) -> tuple[list[DueRecord], list[Progress]]:
        return super().take(now_ms + TICK_MS)


class ForgetsCancels(SteppedDelays):
    """Takes no note of what was cancelled."""

    def take(self, now_ms: int) -> tuple[list[DueRecord], list[Progress]]:
        batch, progress = super().take(now_ms)
        return [each._replace(cancelled=()) for each in batch], progress


@pytest.mark.slow
def test_each_message_arrives_once_and_not_early(rng: random.Random) -> None:
    """Whatever happens to disk, clock and partitions."""
    for _ in range(examples(50)):
        asyncio.run(DelayWalk(rng.randrange(1 << 32)).play(120))


@pytest.mark.slow
@pytest.mark.parametrize("make", [ProgressBeside, EarlyTick, ForgetsCancels])
def test_a_broken_rule_is_found(rng: random.Random, make: type[SteppedDelays]) -> None:
    """So a walk that finds nothing says something."""
    for _ in range(FOUND_WITHIN):
        try:
            asyncio.run(DelayWalk(rng.randrange(1 << 32), make).play(60))
        except AssertionError:
            return
    pytest.fail(f"{make.__name__} was not found")
