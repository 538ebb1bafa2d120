"""States that are read again while a settle is on its way."""

import asyncio
from typing import Any

import pytest

from metaq.broker.context import BrokerContext
from metaq.broker.internal_logs import InternalLogs, OnStored
from metaq.errors import MetaqError, NoSpaceError
from metaq.model import LogId, MessageId
from metaq.protocol.commands import Mput, Result, Settle, Take, Value
from metaq.protocol.queue_frames import SettleVerb, encode_settlements
from metaq.record.checksum import checksum
from metaq.record.layout import encode_record
from metaq.zk.group_definitions import QueueGroupDefinition
from tests.broker.queue_rig import (
    GROUP,
    LoopClock,
    QueueRig,
    QueueSession,
    SteppedQueues,
)
from tests.broker.queue_worker import Got, got_of
from tests.rigs.fs import FaultyFileSystem
from tests.rigs.virtual_time import run_virtually


async def ask(rig: QueueRig, session: QueueSession, command: Any) -> Any:
    """Return the answer to a command, once the disk has done all it can."""
    answers = list[Result | Value]()
    rig.ask(session, command, answers.append)
    while not answers:
        rig.bench.run()
        await asyncio.sleep(0.01)
    return answers[0]


async def take(rig: QueueRig, session: QueueSession, opaque: int) -> list[Got]:
    command = Take("test", GROUP, 0, 9, 1 << 20, opaque, "w", wait_ms=10_000)
    return got_of(await ask(rig, session, command))


async def give_one(rig: QueueRig, session: QueueSession) -> Got:
    """Store a message, and give it out."""
    body = encode_record(b"a", id=MessageId(0), flag=0)
    put = Mput("test", 0, 1, checksum(body), 1, body)
    assert (await ask(rig, session, put)).status == 200
    (got,) = await take(rig, session, 2)
    return got


class Refusing(InternalLogs):
    """Refuses appends at once, as a directory that is low on space does."""

    is_low = False

    def append(
        self, log_id: LogId, payload: bytes, on_stored: OnStored, **more: Any
    ) -> None:
        if self.is_low:
            on_stored(NoSpaceError("low on space"))
        else:
            super().append(log_id, payload, on_stored, **more)


class LowOnSpace(SteppedQueues):
    """The service over such a directory."""

    def __init__(self, context: BrokerContext) -> None:
        super().__init__(context)
        self._journal = self.refusing = Refusing(context)


@pytest.mark.parametrize("partition", [-1, 0])
def test_queues_that_could_not_be_opened_are_opened_once_there_is_room(
    partition: int,
) -> None:
    """The first take after a start is refused; the group is not left without them."""

    async def scenario() -> None:
        definition = QueueGroupDefinition(topic="test", dead_letter_topic=None)
        rig = await QueueRig(
            FaultyFileSystem(), LoopClock(), definition, LowOnSpace
        ).start()
        session, service = QueueSession(rig), rig.service
        assert isinstance(service, LowOnSpace)
        body = encode_record(b"a", id=MessageId(0), flag=0)
        put = Mput("test", 0, 1, checksum(body), 1, body)
        assert (await ask(rig, session, put)).status == 200

        def command(opaque: int) -> Take:
            return Take(
                "test", GROUP, partition, 9, 1 << 20, opaque, "w", wait_ms=10_000
            )

        service.refusing.is_low = True
        refused = await ask(rig, session, command(2))
        assert isinstance(refused, Result)
        assert (refused.status, b"low on space" in refused.body) == (503, True)
        service.refusing.is_low = False
        await asyncio.sleep(30)
        (got,) = got_of(await ask(rig, session, command(3)))
        assert got.data == b"a"
        await rig.kill()

    run_virtually(scenario())


@pytest.mark.parametrize("is_appended", [False, True])
def test_a_settle_that_is_answered_is_known_to_what_is_read_again(
    is_appended: bool,
) -> None:
    """It is in flight, and so not read; or is not appended, and has to come again."""

    async def scenario() -> None:
        definition = QueueGroupDefinition(topic="test", dead_letter_topic=None)
        rig = await QueueRig(FaultyFileSystem(), LoopClock(), definition).start()
        session = QueueSession(rig)
        got = await give_one(rig, session)
        entries = encode_settlements([got.says(SettleVerb.ACK)])
        answers = list[Result]()
        settle: Any = Settle("test", GROUP, 0, 1, entries, 3, "w")
        rig.ask(session, settle, answers.append)  # type: ignore[arg-type]
        if is_appended:
            await asyncio.sleep(0.001)
        assert not answers
        rig.service.fail(MetaqError("a record was refused"))
        await asyncio.sleep(1)  # the reading has its time before the disk is done
        rig.bench.run()
        await asyncio.sleep(1)
        assert [each.status for each in answers] == [200 if is_appended else 503]
        again = await take(rig, session, 4)
        assert len(again) == (not is_appended)
        await rig.kill()

    run_virtually(scenario())


def test_what_comes_while_the_service_stops_is_refused_and_does_not_fail_it() -> None:
    """A settle, a taker and a dead letter would each begin a task."""

    async def scenario() -> None:
        definition = QueueGroupDefinition(topic="test", dead_letter_topic="dead")
        rig = await QueueRig(FaultyFileSystem(), LoopClock(), definition).start()
        session = QueueSession(rig)
        got = await give_one(rig, session)
        rig.service.fail(MetaqError("a record was refused"))
        rig.bench.run()
        await asyncio.sleep(1)  # what is given out is to be found again
        stopping = asyncio.ensure_future(rig.service.stop())
        await asyncio.sleep(0)
        answers = list[Result | Value]()
        entries = encode_settlements([got.says(SettleVerb.REJECT, text="bad")])
        settle: Any = Settle("test", GROUP, 0, 1, entries, 3, "w")
        rig.ask(session, settle, answers.append)
        more: Any = Take("test", GROUP, 0, 9, 1 << 20, 4, "w", wait_ms=10_000)
        rig.ask(session, more, answers.append)
        await rig.play(stopping)
        assert isinstance(answers[0], Result)
        assert answers[0].status == 503
        assert rig.service.failure is None
        await rig.kill()

    run_virtually(scenario())


def test_states_that_are_not_written_are_read_again_later_and_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A disk that stays full is named once, and costs a few readings."""

    async def scenario() -> None:
        definition = QueueGroupDefinition(topic="test", dead_letter_topic=None)
        rig = await QueueRig(FaultyFileSystem(), LoopClock(), definition).start()
        session = QueueSession(rig)
        got = await give_one(rig, session)
        entries = encode_settlements([got.says(SettleVerb.ACK)])
        rig.fs.set_capacity(rig.fs.used_bytes())
        for opaque in range(300):
            settle: Any = Settle("test", GROUP, 0, 1, entries, 3 + opaque, "w")
            assert (await ask(rig, session, settle)).status in (500, 503)
            await asyncio.sleep(0.1)
        assert rig.service.fail_count <= 10
        rig.fs.set_capacity(1 << 40)
        await asyncio.sleep(30)
        assert rig.service.problems() == ()
        assert len(await take(rig, session, 1000)) == 1
        await rig.kill()

    caplog.set_level("INFO", "metaq.broker.queue_service")
    run_virtually(scenario())
    away, again = (
        record.getMessage()
        for record in caplog.records
        if record.name == "metaq.broker.queue_service"
    )
    assert away.startswith("queue groups not served: partition=__queues-0 error=")
    assert again == "queue groups served again: partition=__queues-0"
