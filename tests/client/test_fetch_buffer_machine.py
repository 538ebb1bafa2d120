"""Random calls of a reader and a fetcher to a fetch buffer, compared with a model.

The model has the messages of each partition in order, with the numbers of those handed
out and handled. No message is skipped, and none is repeated unless it was given back.
"""

import asyncio
import contextlib
from itertools import chain

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from metaq.client.consume.current_batch import CurrentBatch, Filling
from metaq.client.consume.fetch_buffer import FetchBuffer
from metaq.errors import OwnershipLostError
from metaq.model import GroupOffset, Message, MessageId, Offset, TopicPartition
from metaq.testing.clock import ManualClock
from tests.client.test_fetch_buffer import ONE, STEP, ZERO, FetchedBatch, batch

PARTITIONS = st.sampled_from([ZERO, ONE])
COUNTS = st.integers(1, 5)
COUNT_MAX = 8


class Log:
    """One partition: numbers of its messages, and what became of them."""

    def __init__(self) -> None:
        self.end = 0
        """Number after the last one fetched."""
        self.numbers: list[int] = []
        """Those that passed the filter."""
        self.out = 0
        """Number of them that were handed out."""
        self.handled = 0
        """Number of those that are handled."""
        self.is_paused = False

    def check_handled(self, offset: Offset) -> None:
        """Nothing unhandled is before a handled offset, and nothing handled after."""
        before, after = self.numbers[: self.handled], self.numbers[self.handled :]
        assert not before or offset >= (before[-1] + 1) * STEP
        assert not after or offset <= after[0] * STEP


class Machine(RuleBasedStateMachine):
    """A fetcher, a reader and a rebalancer, one call at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = FetchBuffer(
            clock=ManualClock(),
            buffer_bytes_max=100 * STEP,
            buffer_count_max=COUNT_MAX,
            on_room=lambda: None,
        )
        self.current = CurrentBatch(self.buffer)
        self.logs = {ZERO: Log(), ONE: Log()}
        self.loop = chain.from_iterable(self.current.pieces())
        for partition in self.logs:
            self.buffer.add(partition, GroupOffset(Offset(0), MessageId(-1)))

    # -- the fetcher ------------------------------------------------------------------

    @rule(partition=PARTITIONS, count=COUNTS)
    def fetch(self, partition: TopicPartition, count: int) -> None:
        if self.buffer.has_room(partition):
            assert not self.logs[partition].is_paused
            self.put(partition, count)

    @rule(partition=PARTITIONS, count=COUNTS)
    def fetch_in_flight(self, partition: TopicPartition, count: int) -> None:
        """An answer to a get that was sent while there was still room."""
        if self.logs[partition].is_paused:
            self.put(partition, count)

    def put(self, partition: TopicPartition, count: int) -> None:
        log = self.logs[partition]
        self.buffer.put(batch(partition, log.end, count))
        log.numbers += range(log.end, log.end + count)
        log.end += count

    @rule(partition=PARTITIONS)
    def fetch_filtered(self, partition: TopicPartition) -> None:
        if self.buffer.has_room(partition):
            log = self.logs[partition]
            log.end += 1
            self.buffer.put(FetchedBatch(partition, [], Offset(log.end * STEP), 0))

    # -- the reader -------------------------------------------------------------------

    def request(self) -> None:
        """More is requested: all that was handed out is handled."""
        for log in self.logs.values():
            log.handled = log.out

    def hand_out(self, messages: list[Message]) -> None:
        for message in messages:
            log = self.logs[message.partition]
            assert not log.is_paused
            assert int(message.data) == log.numbers[log.out]
            log.out += 1

    @rule(count=COUNTS)
    def loop_over(self, count: int) -> None:
        for _ in range(count):
            self.request()
            message = next(self.loop, None)
            if message is None:
                taken = self.buffer.take_nowait()
                self.loop = chain.from_iterable(self.current.pieces())
                if taken is None:
                    return
                self.current.hold(taken)
            else:
                self.hand_out([message])

    @rule(count=COUNTS)
    def receive(self, count: int) -> None:
        self.request()
        many = self.current.some(count)
        while not many:
            taken = self.buffer.take_nowait()
            if taken is None:
                return
            self.current.hold(taken)
            many = self.current.some(count)
        assert len(many) <= count
        self.hand_out(many)

    @rule(
        count=st.integers(1, 12),
        bytes_max=st.none() | st.integers(1, 8 * STEP),
        halted=st.none() | PARTITIONS,
        is_revoked=st.booleans(),
        end=st.sampled_from(["", "cancel", "commit"]),
    )
    def fill(
        self,
        count: int,
        bytes_max: int | None,
        halted: TopicPartition | None,
        is_revoked: bool,
        end: str,
    ) -> None:
        """A list, while which a partition may go, and which may be cancelled."""
        self.request()
        filling = Filling(self.current, count_max=count, bytes_max=bytes_max)
        is_full = filling.add_nowait()
        if halted is not None and not is_full:
            if is_revoked:
                self.lose(halted)
            else:
                self.pause(halted)
            is_full = filling.add_nowait()
        if end == "cancel":
            self.current.release()
            return
        messages = filling.messages
        assert len(messages) <= count
        assert bytes_max is None or len(messages) <= max(1, bytes_max // STEP)
        assert is_full or not any(
            self.buffer.statistics()[one].buffered_count
            for one, log in self.logs.items()
            if not log.is_paused
        )
        self.hand_out(messages)
        begins: dict[TopicPartition, Offset] = {}
        for message in messages:
            begins.setdefault(message.partition, message.offset)
            assert message.next_offset <= filling.offsets[message.partition]
        assert filling.begins == begins
        assert filling.is_last
        if end == "commit":
            self.commit()
            for one, offset in filling.offsets.items():
                self.logs[one].check_handled(offset)

    @rule()
    def commit(self) -> None:
        with contextlib.suppress(OwnershipLostError):  # one was lost before
            self.current.confirm()
        self.request()

    def deliver_again(self, partition: TopicPartition | None = None) -> None:
        for one, log in self.logs.items():
            if partition in (None, one):
                log.out = log.handled

    @rule()
    def interrupt(self) -> None:
        self.current.recover()
        self.deliver_again()

    @rule()
    def give_back(self) -> None:
        self.current.release()
        self.deliver_again()

    @invariant()
    def handled_offsets_are_exact(self) -> None:
        for partition, handled in self.buffer.handled().items():
            self.logs[partition].check_handled(handled.offset)

    @invariant()
    def paused_partitions_take_no_space(self) -> None:
        count = sum(
            buffer.buffered_count
            for buffer in self.buffer.statistics().values()
            if not buffer.is_paused
        )
        assert self.buffer.has_space == (count < COUNT_MAX)

    # -- pause, and the rebalancer ----------------------------------------------------

    @rule(partition=PARTITIONS)
    def pause(self, partition: TopicPartition) -> None:
        self.buffer.set_paused([partition], is_paused=True)
        self.logs[partition].is_paused = True

    @rule(partition=PARTITIONS)
    def resume(self, partition: TopicPartition) -> None:
        self.buffer.set_paused([partition], is_paused=False)
        self.logs[partition].is_paused = False

    @rule(partition=PARTITIONS)
    def lose(self, partition: TopicPartition) -> None:
        handled = self.buffer.fence(partition)
        assert handled is not None
        self.deliver_again(partition)
        self.read_again(partition, handled)

    @rule(partition=PARTITIONS, count=COUNTS)
    def revoke(self, partition: TopicPartition, count: int) -> None:
        """The reader has until its next request."""

        async def revoke() -> None:
            draining = asyncio.ensure_future(self.buffer.drain(partition, timeout_s=9))
            await asyncio.sleep(0)
            self.receive(count)
            assert await draining
            handled = self.buffer.fence(partition)
            assert handled is not None
            self.read_again(partition, handled)

        asyncio.run(revoke())

    def read_again(self, partition: TopicPartition, handled: GroupOffset) -> None:
        """Fetch what is not handled once more; it may come in other batches."""
        log = self.logs[partition]
        log.check_handled(handled.offset)
        log.is_paused = False
        self.buffer.add(partition, handled)
        rest = log.numbers[log.handled :]
        assert log.out == log.handled
        if rest:
            log.end = rest[-1] + 1
            messages = [batch(partition, each, 1).messages[0] for each in rest]
            end = Offset(log.end * STEP)
            self.buffer.put(FetchedBatch(partition, messages, end, len(rest) * STEP))

    def teardown(self) -> None:
        for partition in self.logs:
            self.resume(partition)
        self.current.release()
        self.deliver_again()
        while any(log.out < len(log.numbers) for log in self.logs.values()):
            outs = [log.out for log in self.logs.values()]
            self.receive(5)
            assert outs != [log.out for log in self.logs.values()]
        self.receive(1)
        self.handled_offsets_are_exact()
        assert all(map(self.buffer.has_room, self.logs))
        assert self.buffer.reached_bounds() == []


TestMachine = Machine.TestCase
# Without shrinking, which takes minutes: a failure prints its steps.
TestMachine.settings = settings(
    max_examples=200, phases=[Phase.generate], stateful_step_count=40
)
