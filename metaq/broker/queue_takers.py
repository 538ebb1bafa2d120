"""Takers of a queue group: `take` commands, answered when there are messages.

Takers wait in the order of their arrival. `pump` delivers: the next taker gets messages
of one queue, and the queues take turns. Bytes that are not in the page cache are read
by the reader threads, and the pump continues when they have arrived.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

from metaq.broker.acks import Answerer, wire_error
from metaq.broker.context import BrokerContext
from metaq.broker.internal_logs import note_damage
from metaq.broker.load import TURN_S
from metaq.broker.queue_groups import QueueGroup, QueueOwner, Reservation, Taker
from metaq.broker.queue_part import ServedQueue
from metaq.deadlines import Deadlines, DeadlineTimer
from metaq.errors import (
    ClosedError,
    CorruptRecordError,
    MetaqError,
    ServerError,
    StorageError,
    WireError,
)
from metaq.protocol.commands import Take
from metaq.protocol.encoding import encode_refusal, encode_value_line
from metaq.protocol.queue_frames import encode_taken
from metaq.queues.rules import Now
from metaq.queues.state import LeasedMessage
from metaq.record.runs import RecordRun, encode_runs
from metaq.zk.group_definitions import LEASE_MS_MAX

TAKE_COUNT_MAX: Final = 1000
"""Maximum messages in one answer."""
TAKE_BYTES_MAX: Final = 1 << 20
"""Maximum bytes of the records in one answer; a larger message is sent alone."""
REPLIES_MAX: Final = 8
"""Replies sent by one system call. A call for each would double their cost; a single
call for all would make every worker wait for the last reply."""
BUSY_MS_MAX: Final = 5_000
"""Longest wait of a `take` with a wait of 0, for a queue that is opened or read."""
RETRY_MS: Final = 1000
"""Interval of retries on a partition that cannot be read, while others are served."""
TIMER_S: Final = 0.005
"""Waits, leases and delays that end within this time are handled together."""


class _TakeReply(NamedTuple):
    """Messages of a queue being sent to a taker."""

    queue: ServedQueue
    taker: Taker
    taken: Sequence[LeasedMessage]
    lease_ms: int


class Takers:
    """Delivers messages to takers. Owned by the service, on the loop."""

    def __init__(self, service: QueueOwner, context: BrokerContext) -> None:
        self._service = service
        self._context = context
        self._ends: Deadlines[Taker] = Deadlines()
        """Ends of waits. One timer serves all, because a timer each would cost as much
        as a put."""
        self._timer = DeadlineTimer(
            self._ends, context.clock.monotonic_s, self._end_waits, together_s=TIMER_S
        )
        self._replies: dict[Answerer, list[bytes]] = {}
        """Replies of the running pump that are not sent yet, by connection."""
        self._reply_count = 0

    @property
    def count(self) -> int:
        """Return the number of waiting takers."""
        return len(self._ends)

    def take(self, command: Take, answerer: Answerer) -> None:
        """Answer a `take` when there are messages, or when its wait is over.

        Raises:
            WireError: the command is refused with this text.
        """
        group = self._service.find_group(command)
        if command.count < 0 or command.max_size < 1:
            raise ServerError(
                "take: expected 0 messages and 1 byte or more, got"
                f" {command.count} and {command.max_size}"
            )
        self._context.topics.require_open(command.topic, command.partition)
        self._service.queues_of(group, command.partition)
        self._service.note_worker(group, command.worker, answerer)
        taker = Taker(command, answerer, group)
        answerer.hold(count=1, size_bytes=0)
        answerer.taker_count += 1
        group.takers[taker] = None
        if not command.count:
            for each in [*group.takers]:
                if each.command.worker == command.worker:
                    self._answer_empty(each)
            return
        self.pump(group)
        limits = self._context.config.limits
        wait_ms = min(command.wait_ms, limits.wait_ms_max)
        if self.count >= limits.waiters_max:
            self._answer_empty(taker)
            return
        if wait_ms <= 0:
            # The pump answers it once no queue is being opened or read.
            wait_ms = BUSY_MS_MAX
        end_s = self._context.clock.monotonic_s() + wait_ms / 1000
        self._ends.set(taker, end_s)
        self._timer.start()

    def _end_waits(self, ended: list[Taker]) -> None:
        for taker in ended:
            self._answer_empty(taker)

    def close(self) -> None:
        """Stop the timer; all takers have been answered before."""
        self._timer.close()

    def end_all(self, group: QueueGroup) -> None:
        """Answer all takers of a group with no messages."""
        for taker in [*group.takers]:
            self._answer_empty(taker)
        for partition in [*group.waits]:
            group.stop_waiting(partition)

    def drop(self, group: QueueGroup, answerer: Answerer) -> None:
        """Answer the takers of an ended connection with no messages."""
        for taker in [each for each in group.takers if each.answerer is answerer]:
            self._answer_empty(taker)

    # -- giving

    def pump(self, group: QueueGroup) -> None:
        """Deliver available messages in the next turn of the loop, for TURN_S at most.

        So the results of several syncs and takes of one turn are sent together.
        """
        if group.is_pumping or not group.takers:
            return
        group.is_pumping = True
        asyncio.get_running_loop().call_soon(self._pump_now, group)

    def _pump_now(self, group: QueueGroup) -> None:
        try:
            if self._may_deliver():
                self._pump(group)
        finally:
            group.is_pumping = False
            self._send_replies()

    def _may_deliver(self) -> bool:
        """Return whether the service runs and, in a set, this replica surely leads."""
        replica = self._context.replica
        return (
            self._context.topics.refusal is None
            and (replica is None or replica.knows_ends)
            and not self._service.is_ending
        )

    def _pump(self, group: QueueGroup) -> None:
        now_s = self._context.clock.monotonic_s
        ends_s = now_s() + TURN_S
        has_sent = True
        while has_sent and group.takers:
            has_sent = False
            for queue in self._round_robin(group):
                if not queue.has_something:
                    continue
                taker = _first_for(group, queue.name.partition)
                if taker is not None and self._serve(group, queue, taker):
                    has_sent = True
                if now_s() >= ends_s:
                    self._context.turns.ask(partial(self.pump, group))
                    return
        for queue in group.queues.values():
            queue.drop_window()
            self._wait_for_data(group, queue)
        if not any(each.is_busy for each in group.queues.values()):
            for taker in [each for each in group.takers if not each.command.wait_ms]:
                self._answer_empty(taker)

    def _round_robin(self, group: QueueGroup) -> list[ServedQueue]:
        try:
            queues = self._service.queues_of(group, -1)
        except WireError as error:
            self.refuse_all(group, error)
            return []
        group.turn += 1
        middle = group.turn % len(queues) if queues else 0
        return queues[middle:] + queues[:middle]

    def _serve(self, group: QueueGroup, queue: ServedQueue, taker: Taker) -> bool:
        """Deliver messages of a queue to a taker; return whether anything changed."""
        now = self._service.now()
        if queue.is_busy or (
            taker.command.partition < 0
            and now.mono_ms < queue.retry_ms
            and _has_sound(group, queue)
        ):
            return False
        count = min(taker.command.count, TAKE_COUNT_MAX)
        try:
            # Messages before the damage are still delivered.
            if not (queue.problem and queue.state.ready_count) and (
                not queue.scan(count, now)
            ):
                self._read(queue, count, group)
                return False
        except (StorageError, ClosedError) as error:
            self._fail(group, queue, error)
            if not queue.state.ready_count:
                return True
        chosen = self._choose(group, queue, now)
        if chosen is None:
            return False
        taker, is_alone = chosen
        command = taker.command
        count = min(command.count, TAKE_COUNT_MAX)
        lease_ms = min(command.lease_ms or queue.state.rules.lease_ms, LEASE_MS_MAX)
        size_max = min(command.max_size, TAKE_BYTES_MAX)
        taken = queue.state.take(
            command.worker, count, size_max, lease_ms, now, is_alone=is_alone
        )
        has_changed = queue.state.has_changes
        if has_changed:  # some have expired
            self._service.send_letters(queue)
            queue.store()
        if not taken:
            return has_changed
        self._end(taker)
        if is_alone:
            self._reserve(group, command.worker, None, queue, now)
        self._service.watch(queue)
        self._send(_TakeReply(queue, taker, taken, lease_ms))
        return True

    def _choose(
        self, group: QueueGroup, queue: ServedQueue, now: Now
    ) -> tuple[Taker, bool] | None:
        """Return the next taker, and whether it gets a message that is delivered alone.

        Such a message goes to a worker without other messages, which gets no others
        until it is settled. If every worker has messages, the first taker's worker is
        reserved: it gets no more until it has settled its own. Both states end after
        one lease of the group.
        """
        is_alone, reserved = queue.state.is_alone_first, group.reservations
        busy: Taker | None = None
        for taker in group.takers:
            worker = taker.command.worker
            if taker.command.partition not in (-1, queue.name.partition):
                continue
            if not is_alone and not reserved:
                return taker, False
            is_free, reservation = not group.holds(worker), reserved.get(worker)
            if reservation is not None:
                is_over = now.mono_ms >= reservation.until_ms
                if is_alone and reservation.queue is queue and (is_free or is_over):
                    return taker, True
                is_wanted = (
                    reservation.queue is not None
                    and reservation.queue.state.is_alone_first
                )
                if not is_over and (
                    is_wanted or (reservation.queue is None and not is_free)
                ):
                    continue
                del reserved[worker]
            if is_alone and is_free:
                return taker, True
            if is_alone and not any(
                each.queue is queue and now.mono_ms < each.until_ms
                for each in reserved.values()
            ):
                self._reserve(group, worker, queue, queue, now)
            elif is_alone:
                busy = busy or taker  # a later taker may have a free worker
            else:
                return taker, False
        return None if busy is None else (busy, False)

    def _reserve(
        self,
        group: QueueGroup,
        worker: str,
        wanted: ServedQueue | None,
        queue: ServedQueue,
        now: Now,
    ) -> None:
        """Deliver nothing else to a worker, for one lease; the next tick ends it."""
        lease_ms, reserved = queue.state.rules.lease_ms, group.reservations
        for name in [
            n for n in reserved if reserved[n].until_ms + lease_ms <= now.mono_ms
        ]:
            del reserved[name]  # the worker is gone
        reserved[worker] = Reservation(now.mono_ms + lease_ms, wanted)

    def _send(self, reply: _TakeReply) -> None:
        """Answer with the records; if they cannot be read, release the messages."""
        queue, taken = reply.queue, reply.taken
        try:
            runs = queue.cached_runs(taken)
        except (StorageError, ClosedError) as error:
            self._release(reply, error)
            return
        if runs is not None:
            self._answer(reply, runs)
            return

        async def read() -> None:
            try:
                runs = await queue.read_runs(taken)
            except (StorageError, ClosedError) as error:
                self._release(reply, error)
            else:
                self._answer(reply, runs)
                self._send_replies()

        self._service.spawn(read(), name="read")

    def _answer(self, reply: _TakeReply, runs: Sequence[RecordRun]) -> None:
        queue, taker, taken, lease_ms = reply
        deliveries = [(offset, number, count) for offset, _, number, count in taken]
        head = encode_taken(queue.name.partition, lease_ms, deliveries)
        payload = head + encode_runs(runs)
        line = encode_value_line(
            len(payload), taker.command.opaque, next_offset=queue.state.scan_offset
        )
        self._replies.setdefault(taker.answerer, []).append(line + payload)
        self._reply_count += 1
        if self._reply_count >= REPLIES_MAX:
            self._send_replies()

    def _send_replies(self) -> None:
        """Send the collected replies, with one call for each connection."""
        replies, self._replies, self._reply_count = self._replies, {}, 0
        for answerer, parts in replies.items():
            try:
                joined = b"".join(parts)
            except MemoryError:
                joined = b""
                answerer.run_out()
            answerer.answer(joined, count=len(parts), size_bytes=0)

    def _read(self, queue: ServedQueue, count: int, group: QueueGroup) -> None:
        """Read the bytes of `count` messages ahead, then pump."""
        queue.is_reading = True

        async def run() -> None:
            try:
                await queue.read_ahead(count)
            except (StorageError, ClosedError) as error:
                self._fail(group, queue, error)
            finally:
                queue.is_reading = False
            self.pump(group)

        self._service.spawn(run(), name="read")

    def _wait_for_data(self, group: QueueGroup, queue: ServedQueue) -> None:
        partition, log = queue.name.partition, queue.log
        if (
            not group.takers
            or partition in group.waits
            or queue.state.scan_offset < log.high_watermark
        ):
            return

        def wake() -> None:
            group.waits.pop(partition, None)
            self.pump(group)

        group.waits[partition] = log.wait(log.high_watermark, wake)

    # -- answers without messages

    def _release(self, reply: _TakeReply, error: MetaqError) -> None:
        queue, taker, taken, _lease_ms = reply
        queue.state.release(taken)
        if isinstance(error, CorruptRecordError):
            at = taken[0].offset
            self._service.spawn(note_damage(queue.log, at), name="damage")
        _note_problem(queue, error, self._service.now())
        if taker.command.partition < 0 and _has_sound(taker.group, queue):
            self._send_empty(taker)
        else:
            self._answer_error(taker, self._error_of(queue, error))

    def _fail(self, group: QueueGroup, queue: ServedQueue, error: MetaqError) -> None:
        """Refuse the takers of a partition that cannot be read and has nothing else.

        Takers of any partition wait for the others while one of those is readable: the
        damage of one partition does not stop the work on the rest.
        """
        _note_problem(queue, error, self._service.now())
        if isinstance(error, CorruptRecordError):
            at = queue.state.scan_offset
            self._service.spawn(note_damage(queue.log, at), name="damage")
        if queue.state.ready_count:
            return
        is_last = not _has_sound(group, queue)
        for taker in [*group.takers]:
            partition = taker.command.partition
            if partition == queue.name.partition or (is_last and partition < 0):
                self._end(taker)
                self._answer_error(taker, self._error_of(queue, error))

    def refuse_all(self, group: QueueGroup, error: WireError) -> None:
        """Answer all takers of a group with an error."""
        for taker in [*group.takers]:
            self._end(taker)
            self._answer_error(taker, error)

    def _error_of(self, queue: ServedQueue, error: MetaqError) -> WireError:
        return wire_error(self._context, error, queue.log.log_id)

    def _answer_error(self, taker: Taker, error: WireError) -> None:
        reply = encode_refusal(error, taker.command.opaque)
        taker.answerer.answer(reply, count=1, size_bytes=0)

    def _answer_empty(self, taker: Taker) -> None:
        self._end(taker)
        self._send_empty(taker)

    def _send_empty(self, taker: Taker) -> None:
        payload = encode_taken(taker.command.partition, 0, ())
        line = encode_value_line(len(payload), taker.command.opaque)
        taker.answerer.answer(line + payload, count=1, size_bytes=0)

    def _end(self, taker: Taker) -> None:
        """Remove a taker from those that wait."""
        taker.answerer.taker_count -= 1
        del taker.group.takers[taker]
        self._ends.clear(taker)


def _first_for(group: QueueGroup, partition: int) -> Taker | None:
    """Return the taker that has waited longest for messages of a partition."""
    for taker in group.takers:
        if taker.command.partition in (-1, partition):
            return taker
    return None


def _note_problem(queue: ServedQueue, error: MetaqError, now: Now) -> None:
    queue.problem, queue.retry_ms = str(error), now.mono_ms + RETRY_MS


def _has_sound(group: QueueGroup, queue: ServedQueue) -> bool:
    """Return whether a group has another partition that can be read."""
    queues = group.queues.values()
    return any(not each.problem for each in queues if each is not queue)
