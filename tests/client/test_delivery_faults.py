"""The producer in virtual time, against any sequence of failures."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from metaq.client.errors import OutcomeUnknownError
from metaq.protocol.version import Capabilities
from tests.client.producing import JAVA, OURS, Act, StandInBroker, producing
from tests.rigs.virtual_time import run_virtually

ACTS = st.lists(st.sampled_from(list(Act)), max_size=12)


@given(acts=ACTS, in_flight=st.integers(1, 5), count=st.integers(1, 40))
def test_whatever_fails_every_future_resolves_and_order_is_kept(
    acts: list[Act], in_flight: int, count: int
) -> None:
    """One partition, a broker that recognises repetitions.

    Acknowledged messages are stored once, at the offset of their result, in order,
    also where some were refused at first. What failed as certainly not stored is not
    there.
    """

    async def main() -> None:
        swallows = {Act.SWALLOW, Act.SWALLOW_STORED}
        broker = StandInBroker()
        broker.acts.extend(acts)
        sent = [b"%04d" % n for n in range(count)]
        options = {"batch_count_max": 4, "in_flight_batches_max": in_flight}
        async with producing(broker, timeout_s=5, **options) as world:
            futures = [await world.producer.send_nowait("test", m) for m in sent]
            await asyncio.sleep(6)
            assert all(future.done() for future in futures)
            assert world.producer.statistics().buffered_bytes == 0
        stored = broker.stored()
        assert len(set(stored)) == len(stored)
        # Brokers carry out what they read in order; one that swallows does not.
        assert not broker.overlap_count or swallows & set(acts)
        acknowledged = []
        for message, future in zip(sent, futures, strict=True):
            error = future.exception()
            if error is None:
                assert stored[future.result().offset // 24] == message
                acknowledged.append(message)
            elif not isinstance(error, OutcomeUnknownError):
                assert message not in stored
        assert [m for m in stored if m in set(acknowledged)] == acknowledged

    run_virtually(main())


@given(
    acts=st.lists(ACTS, min_size=2, max_size=2),
    aways=st.lists(
        st.tuples(st.integers(0, 1), st.floats(0, 2), st.floats(0, 2)), max_size=4
    ),
    capabilities=st.sampled_from([OURS, JAVA]),
    count=st.integers(1, 40),
)
def test_two_brokers_that_come_and_go_lose_nothing_that_was_acknowledged(
    acts: list[list[Act]],
    aways: list[tuple[int, float, float]],
    capabilities: Capabilities,
    count: int,
) -> None:
    """An acknowledged message is stored at its result, also after a move."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        brokers = [StandInBroker(n, capabilities) for n in range(2)]
        for broker, script in zip(brokers, acts, strict=True):
            broker.acts.extend(script)
        for number, start_s, length_s in aways:
            loop.call_later(start_s, brokers[number].go_away)
            loop.call_later(start_s + length_s, brokers[number].come_back)
        async with producing(*brokers, timeout_s=5, batch_count_max=3) as world:
            futures = []
            for n in range(count):
                futures.append(await world.producer.send_nowait("test", b"%04d" % n))
                await asyncio.sleep(0.05)
            await asyncio.sleep(6)
            assert all(future.done() for future in futures)
        for n, future in enumerate(futures):
            error = future.exception()
            if error is None:
                where = future.result()
                stored = brokers[where.partition.broker_id].stored()
                assert stored[where.offset // 24] == b"%04d" % n
            elif not isinstance(error, OutcomeUnknownError):
                assert all(b"%04d" % n not in b.stored() for b in brokers)

    run_virtually(main())
