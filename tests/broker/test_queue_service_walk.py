"""Random walks over the service of queue groups: kills, power cuts, a full disk."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from metaq.broker.context import BrokerContext
from metaq.broker.internal_logs import InternalLogs
from metaq.broker.joined_appends import JoinedAppends, JoinedBatch, JoinedRecord
from metaq.broker.queue_letters import Letters
from metaq.errors import MetaqError
from metaq.model import LogId
from tests.broker.queue_rig import SteppedQueues
from tests.broker.queue_walk import QueueWalk
from tests.rigs.virtual_time import run_virtually
from tests.sampling import examples

FOUND_WITHIN = 100
"""Walks in which a broken rule is found."""


class _TooEarly(InternalLogs):
    """Says that a record is stored before it is."""

    def append(
        self,
        log_id: LogId,
        payload: bytes,
        on_stored: Callable[[MetaqError | None], None],
        **more: Any,
    ) -> None:
        super().append(log_id, payload, lambda _error: None, **more)
        on_stored(None)


class AnswersBeforeTheSync(SteppedQueues):
    """Answers settles, and gives out messages, before what is needed is stored."""

    def __init__(self, context: BrokerContext) -> None:
        super().__init__(context)
        self._journal = _TooEarly(context)


class _OneByOne(JoinedAppends):
    """Appends each record for itself."""

    def append(
        self,
        records: Sequence[JoinedRecord | JoinedBatch],
        on_done: Callable[[MetaqError | None], None],
    ) -> None:
        first, *others = records

        def go_on(error: MetaqError | None) -> None:
            if error is not None or not others:
                on_done(error)
            else:
                self.append(others, on_done)

        super().append([first], go_on)


class LettersBeside(SteppedQueues):
    """Stores a dead letter, and then that its message is done."""

    def __init__(self, context: BrokerContext) -> None:
        super().__init__(context)
        self.letters = Letters(self, context, _OneByOne(context))  # type: ignore[misc]


class NoReclaim(SteppedQueues):
    """Gives out what workers had as soon as it is there again."""

    def restart_reclaim(self) -> None:
        pass


class SaysThatNothingIsHeld(SteppedQueues):
    """Ends with the word that no worker has anything, where some have."""

    async def _end_queues(self) -> None:
        for _, queue in self.parts():
            queue.note_done((), lambda _error: None)


@pytest.mark.slow
def test_each_message_is_done_once(rng: random.Random) -> None:
    """Whatever happens to disk, connections and clock."""
    for _ in range(examples(60)):
        run_virtually(QueueWalk(rng.randrange(1 << 32)).play(150))


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [AnswersBeforeTheSync, LettersBeside, NoReclaim, SaysThatNothingIsHeld],
)
def test_a_broken_rule_is_found(rng: random.Random, make: type[SteppedQueues]) -> None:
    """So a walk that finds nothing says something."""
    for _ in range(FOUND_WITHIN):
        try:
            run_virtually(QueueWalk(rng.randrange(1 << 32), make).play(150))
        except AssertionError:
            return
    pytest.fail(f"{make.__name__} was not found")
