"""Queue groups of a broker: workers, starts, topics, definitions."""

import asyncio
from pathlib import Path

import pytest

from metaq.broker.app import Broker
from metaq.protocol.queue_frames import SettleVerb, Word
from tests.broker.queue_worker import QUICK, Worker, define, put, run
from tests.rigs.broker import Peer, running_broker
from tests.rigs.waiting import until


@pytest.mark.slow
def test_a_worker_that_is_cut_off_keeps_its_messages_when_it_is_back(
    tmp_path: Path,
) -> None:
    """Its leases end a moment after its connection; a new one in time keeps them."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        await put(peer, b"kept", b"lost")
        async with Peer(broker) as gone:
            (reservations,) = await Worker(gone, "w1").take(1)
        async with Peer(broker) as back:
            worker = Worker(back, "w1")
            assert await worker.say(reservations, SettleVerb.EXTEND, 30_000) is Word.OK
            assert [g.data for g in await worker.take(9, wait_ms=300)] == [b"lost"]
            assert await worker.ack(reservations) is Word.OK
        async with Peer(broker) as other:
            (again,) = await Worker(other, "w2").take(9, wait_ms=20_000)
            assert (again.data, again.deliveries) == (b"lost", 2)

    run(tmp_path, scenario)


def test_a_group_that_starts_at_the_end_gets_what_comes_later(tmp_path: Path) -> None:
    """As of its definition, not of the first take; also after a restart."""

    async def main() -> None:
        async with running_broker(tmp_path, QUICK) as broker, Peer(broker) as peer:
            await put(peer, b"before")
            define(broker, start="latest")
            await put(peer, b"after")
        async with running_broker(tmp_path, QUICK) as broker, Peer(broker) as peer:
            define(broker, start="latest")
            got = await Worker(peer).take(9, wait_ms=20_000)
            assert [each.data for each in got] == [b"after"]

    asyncio.run(main())


def test_a_deleted_topic_takes_its_queues_along(tmp_path: Path) -> None:
    """A topic that is made again has none of what was done."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        queues = broker.context.queues
        await put(peer, b"a")
        worker = Worker(peer)
        (got,) = await worker.take(1)
        assert await worker.ack(got) is Word.OK
        queues.drop_topic("test")
        await until(lambda: all('"open"' not in each for each in queues.lines()))
        (again,) = await worker.take(1, wait_ms=20_000)
        assert (again.data, again.deliveries) == (b"a", 1)

    run(tmp_path, scenario)


@pytest.mark.slow
def test_a_later_group_of_a_name_has_nothing_of_the_one_before(tmp_path: Path) -> None:
    """Nor has one that was deleted; one without a definition keeps what it has."""

    async def main() -> None:
        async with running_broker(tmp_path, QUICK) as broker, Peer(broker) as peer:
            queues, worker = broker.context.queues, Worker(peer)
            assert queues is not None
            define(broker)
            await put(peer, b"a")
            assert await worker.ack((await worker.take(1))[0]) is Word.OK
            queues.apply_groups({})
            define(broker)
            assert await worker.take(1, wait_ms=300) == []
            define(broker, generation=1)
            (again,) = await worker.take(1, wait_ms=20_000)
            assert await worker.ack(again) is Word.OK
            define(broker, generation=1, is_deleted=True)
            define(broker, generation=1)
            assert len(await worker.take(1, wait_ms=20_000)) == 1

    asyncio.run(main())


def test_a_worker_of_a_former_or_later_group_is_refused(tmp_path: Path) -> None:
    """Its deliveries are of another group; an ack would be of another message."""

    async def main() -> None:
        async with running_broker(tmp_path, QUICK) as broker, Peer(broker) as peer:
            old, new = Worker(peer, generation=0), Worker(peer, "w2", generation=1)
            define(broker)
            await put(peer, b"a")
            (a,) = await old.take(1)
            refused = await new.ask(new.taking())
            assert (refused.status, "not defined here" in refused.text) == (503, True)
            define(broker, generation=1)
            (again,) = await new.take(1, wait_ms=20_000)
            refused = await old.ask(old.settling(0, [a.says(SettleVerb.ACK)]))
            assert (refused.status, "not defined here" in refused.text) == (503, True)
            assert (await old.ask(old.taking())).status == 503
            assert await new.ack(again) is Word.OK

    asyncio.run(main())


def test_a_worker_of_a_group_that_is_not_understood_hears_why(tmp_path: Path) -> None:
    """Not that it is not defined, which workers take for deleted in the end."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        queues = broker.context.queues
        assert queues is not None
        queues.apply_groups({}, {"newer": "made by a newer version"})
        worker = Worker(peer, group="newer")
        refused = await worker.ask(worker.taking())
        assert refused.status == 500
        assert refused.text == "queue group 'newer': made by a newer version"

    run(tmp_path, scenario)
