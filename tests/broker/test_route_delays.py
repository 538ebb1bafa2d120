"""Messages with a time for an exchange: they wait for each topic, once."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from metaq.broker.exchanges import Exchanges
from metaq.protocol.commands import Mput
from metaq.routing.match import Binding
from tests.broker.delay_rig import DelayRig
from tests.broker.route_rig import EXCHANGE, batch_of, exchange_of
from tests.rigs.fs import keep_all
from tests.txn.support import TOPIC

TOPICS = ("t0", "t1")
BOTH = Binding("t0", "#"), Binding("t1", "a.*")


def bind(rig: DelayRig, *bindings: Binding, **more: Any) -> DelayRig:
    """Have an exchange with these bindings."""
    defined = {name: replace(TOPIC, name=name, partition_count=1) for name in TOPICS}
    rig.bench.topics.apply(replace(rig.bench.logs.config, defined=defined))
    exchanges = Exchanges(rig.bench.topics, lambda: None)
    exchanges.apply({EXCHANGE: exchange_of(*bindings, **more)}, TOPICS)
    return rig


def found(rig: DelayRig) -> list[list[bytes]]:
    """Return the data that readers of each topic see."""
    return [
        [each.rpartition(b"|")[2] for each in rig.payloads(0, topic)]
        for topic in TOPICS
    ]


def delayed(rig: DelayRig, delay_ms: int, **more: Any) -> Mput:
    messages = ("a.b", b"|1"), ("b", b"|2"), ("a.c", b"|3")
    return batch_of(*messages, deliver_ms=rig.now_ms + delay_ms, **more)


def test_a_batch_waits_for_each_topic_and_is_there_once() -> None:
    """Sent again, in another tier, after a kill, and when its time has come."""

    async def main() -> None:
        rig = bind(await DelayRig().start(), *BOTH)
        command = delayed(rig, 4_000_000, producer="p", sequence=0)
        first = await rig.send(command)
        assert first.text.split()[1:] == ["0", "-1", "routed=5"], first
        assert found(rig) == [[], []]
        rig.clock.advance_s(600.0)
        assert await rig.send(command) == first
        rig = bind(await rig.again(keep_all), *BOTH)
        assert await rig.send(command) == first
        await rig.pass_s(4000.0)
        assert await rig.send(command) == first
        await rig.tick()
        assert found(rig) == [[b"1", b"2", b"3"], [b"1", b"3"]]
        await rig.kill()

    asyncio.run(main())


def test_each_message_waits_for_its_own_time() -> None:
    """In one batch, also where a target has some of them, and in a transaction."""

    async def main() -> None:
        rig = bind(await DelayRig().start(), *BOTH)
        messages = ("a.b", b"|1"), ("b", b"|2"), ("a.c", b"|3"), ("a.d", b"|4")
        times = [rig.now_ms + each for each in (3000, 1000, 0, 3000)]
        command = batch_of(*messages, times=times, producer="p", sequence=0)
        first = await rig.send(command)
        assert first.text.split()[1:] == ["0", "-1", "routed=7"], first
        assert await rig.send(command) == first
        await rig.tick()
        assert found(rig) == [[b"3"], [b"3"]]
        await rig.pass_s(1.0)
        assert found(rig) == [[b"3", b"2"], [b"3"]]
        rig = bind(await rig.again(keep_all), *BOTH)
        await rig.pass_s(2.0)
        assert found(rig) == [[b"3", b"2", b"1", b"4"], [b"3", b"1", b"4"]]
        messages = ("a.b", b"|5"), ("a.c", b"|6")
        times = [rig.now_ms + each for each in (2000, 1000)]
        assert await rig.commit(batch_of(*messages, times=times), 0.0)
        await rig.pass_s(1.0)
        assert found(rig)[1][-1] == b"6"
        await rig.pass_s(1.0)
        assert found(rig)[1][-2:] == [b"6", b"5"]
        await rig.kill()

    asyncio.run(main())


def test_what_one_topic_lacks_waits_for_that_one() -> None:
    """The bindings count when it is sent: a second try has one more."""

    async def main() -> None:
        rig = bind(await DelayRig().start(), BOTH[1], alternate="t0")
        fields: dict[str, Any] = {"producer": "p", "sequence": 0}
        command = batch_of(("a.b", b"|1"), deliver_ms=rig.now_ms + 1000, **fields)
        assert (await rig.send(command)).status == 200
        bind(rig, *BOTH)
        assert (await rig.send(command)).text.endswith("routed=2")
        bind(rig)
        await rig.pass_s(2.0)
        assert found(rig) == [[b"1"], [b"1"]]
        await rig.kill()

    asyncio.run(main())


@pytest.mark.parametrize("is_committed", [True, False])
def test_a_transaction_has_them_wait_from_its_commit_on(is_committed: bool) -> None:
    """Or not at all."""

    async def main() -> None:
        rig = bind(await DelayRig().start(), *BOTH)
        command = delayed(rig, 60_000)
        assert await rig.commit(command, 1.0, is_committed=is_committed) is is_committed
        assert found(rig) == [[], []]
        await rig.pass_s(60.0)
        kept = [[b"1", b"2", b"3"], [b"1", b"3"]] if is_committed else [[], []]
        assert found(rig) == kept
        await rig.kill()

    asyncio.run(main())


def test_a_transaction_has_them_wait_once_for_each_topic_over_a_kill() -> None:
    """In the journal all copies of a message have its id, and one partition.

    A start took the second one for a repetition, and appended the others again.
    """

    async def main() -> None:
        rig = bind(await DelayRig().start(), *BOTH)
        assert await rig.commit(delayed(rig, 60_000), 0.0, delayed(rig, 60_000))
        rig = bind(await rig.again(keep_all), *BOTH)
        await rig.pass_s(60.0)
        assert found(rig) == [2 * [b"1", b"2", b"3"], 2 * [b"1", b"3"]]
        await rig.kill()

    asyncio.run(main())


def test_what_no_binding_matches_is_refused_also_where_it_is_not_mandatory() -> None:
    """There is nothing that it could wait for; an alternate topic is something."""

    async def main() -> None:
        rig = bind(await DelayRig().start(), BOTH[1])
        for is_mandatory in (True, False, None):
            command = delayed(rig, 1000, is_mandatory=is_mandatory)
            reply = await rig.send(command)
            assert reply.status == 500
            assert "no binding of exchange 'events' matches" in reply.text
        bind(rig, BOTH[1], alternate="t0")
        assert (await rig.send(delayed(rig, 1000))).status == 200
        await rig.pass_s(2.0)
        assert found(rig) == [[b"2"], [b"1", b"3"]]
        await rig.kill()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("delay_ms", "limits", "text"),
    [
        (401 * 86_400_000, {}, "expected a time within 400d"),
        (1000, {"payload_bytes_max": 100}, "expected at most 100 bytes"),
        (1000, {"delay_bytes_max": -1}, "[no-room]"),
    ],
)
def test_what_cannot_wait_is_refused_and_is_nowhere(
    delay_ms: int, limits: dict[str, int], text: str
) -> None:
    async def main() -> None:
        rig = bind(await DelayRig(**limits).start(), *BOTH)
        reply = await rig.send(delayed(rig, delay_ms))
        assert reply.status == 500
        assert text in reply.text
        await rig.pass_s(2.0)
        assert found(rig) == [[], []]
        await rig.kill()

    asyncio.run(main())


def test_a_time_that_has_passed_is_none() -> None:
    """As with a topic; a broker that delays nothing says so."""

    async def main() -> None:
        rig = bind(await DelayRig().start(), *BOTH)
        assert (await rig.send(delayed(rig, 0))).status == 200
        assert found(rig)[1] == [b"1", b"3"]
        rig.context.delays = None
        reply = await rig.send(delayed(rig, 1000))
        assert (reply.status, "delays no messages" in reply.text) == (503, True)
        await rig.kill()

    asyncio.run(main())


def test_a_tier_that_cannot_be_made_refuses_the_batch_with_the_reason() -> None:
    """As where a message waits for one topic; nothing waits for another one."""

    async def main() -> None:
        rig = bind(await DelayRig().start(), *BOTH)
        config = rig.bench.logs.config
        elsewhere = replace(config.system, data_path="/elsewhere")
        defined = {name: replace(TOPIC, name=name) for name in TOPICS}
        changed = replace(config, system=elsewhere, defined=defined)
        rig.bench.topics.apply(changed)
        for inside in ({}, {"producer": "p", "sequence": 0}):
            reply = await rig.send(delayed(rig, 1000, **inside))
            assert (reply.status, "/elsewhere" in reply.text) == (500, True), reply
        assert not await rig.commit(delayed(rig, 1000), 0.0)
        rig.bench.topics.apply(config)
        bind(rig, *BOTH)
        assert (await rig.send(delayed(rig, 1000))).status == 200
        await rig.pass_s(1.0)
        assert found(rig) == [[b"1", b"2", b"3"], [b"1", b"3"]]
        await rig.kill()

    asyncio.run(main())
