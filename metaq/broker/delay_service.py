"""Delayed messages of a broker: scheduling, cancellation, delivery.

Theory of operation. A delayed put is stored in `__delays`, in the partition of its
tier, as other puts are stored in their topics (`delay_puts.py`). One task runs every
TICK_MS:

    follow     each tier adds new records of its partition to its index
    take       select due messages, at most one batch (`delay/plan.py`)
    deliver    one transaction of the broker: the messages to their partitions, those
               that a target refuses to a tier again, and the progress
    done       the transaction is decided: the progress is in effect

A crash leaves both messages and progress, or neither. A failed transaction stores
nothing, and its messages are read again. One transaction is in progress at a time, so
at most a batch is delivered per BATCH_PAUSE_S, even after days of downtime.

A tier that cannot be read stops alone. Everything runs on the event loop.
"""

import asyncio
import json
import logging
import math
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Final, TypeAlias

from metaq.broker.acks import REFUSALS, Answerer
from metaq.broker.context import BrokerContext
from metaq.broker.delay_cancel import (
    CANCELLED,
    DELIVERED,
    REMEMBERED_MAX,
    UNKNOWN,
    RecordKey,
    message_index,
    parse_receipt,
)
from metaq.broker.delay_status import DelayStatus, list_scheduled
from metaq.broker.delay_tier import DelayTier
from metaq.broker.internal_logs import InternalLogs, read_records
from metaq.broker.joined_appends import JoinedAppends, JoinedBatch, JoinedRecord
from metaq.broker.wall_time import WallTime
from metaq.delay.plan import (
    TICK_MS,
    TIERS,
    DueEntry,
    DueRecord,
    Progress,
    advanced,
    is_done,
    lowered,
    retry_delay_ms,
    take_batch,
    tier_of,
)
from metaq.delay.records import (
    PROGRESS_PARTITION,
    TOPIC,
    DelayHead,
    DelayKind,
    DelayState,
    decode_head,
    decode_state,
    encode_cancelled,
    encode_head,
    encode_state,
)
from metaq.errors import (
    ClosedError,
    CorruptRecordError,
    MetaqError,
    StorageError,
    UnavailableError,
)
from metaq.lifecycle import Service
from metaq.model import LogId, Offset, SizeBytes
from metaq.protocol.commands import Cancel, ListScheduled, Status
from metaq.protocol.encoding import encode_result
from metaq.record.layout import record_positions
from metaq.retry import Backoff
from metaq.storage.log_removal import outcome_of

_log = logging.getLogger(__name__)

BATCH_PAUSE_S: Final = 0.001
"""Minimum time between two batches, in which the loop does other work."""
REQUESTS_MAX: Final = 1000
"""Maximum cancels and listings in progress."""
DROPPED_MAX: Final = 1000
"""Maximum deleted topics that are remembered while messages wait for them."""
PROGRESS_KEPT_BYTES: Final = 1 << 20
"""Bytes kept of the progress partition; the record in effect is among the last ones."""
RETRY: Final = Backoff(first_s=0.2, max_s=10.0)
Drop: TypeAlias = tuple[str, Callable[[MetaqError | None], None]]
"""A deleted topic, and the callback of the deletion."""
_SESSION: Final = "metaq-delays"


@dataclass(slots=True)
class _Delivery:
    """One batch: the records to append, and the figures of it."""

    appends: list[JoinedRecord | JoinedBatch]
    delivered: Counter[str]
    """Messages by topic."""
    refused: dict[str, str]
    """Error by topic."""


class DelayService(Service):
    """Delayed messages of one broker. Owned by the app, on the loop."""

    def __init__(self, context: BrokerContext) -> None:
        super().__init__("delays", stop_timeout_s=2.0)
        self._context = context
        self._logs: Final = InternalLogs(context)
        self.tiers: Final = [DelayTier(n, context) for n in range(TIERS)]
        self._held: Counter[RecordKey] = Counter()
        """Records with a message that is being cancelled. Their tiers stop there."""
        self._released: list[RecordKey] = []
        self._followed = asyncio.Event()
        """Set and replaced each time the tiers are up to date."""
        self._cancelled: dict[tuple[int, int, int], None] = {}
        """Tier, offset and id of recently cancelled messages."""
        self._cancelled_count = 0
        self._joined = JoinedAppends(context, _SESSION)
        self._state: DelayState | None = None
        self._wall = WallTime(*self._clocks())
        self._drops: list[Drop] = []
        self._wake = asyncio.Event()
        self._problem = ""
        self._stalled: dict[str, str] = {}
        self._request_count = 0
        self._listing = asyncio.Lock()
        """Serializes listings, because each step of one takes a turn of the loop."""
        self._delivered_count = 0
        self._late_ms = 0

    # -- commands

    def cancel(self, command: Cancel, answerer: Answerer) -> None:
        """Cancel a message, by its receipt, before it is due.

        A cancel record is stored in its tier before the answer. Until then the tier
        stops before that message. If the record is refused, the message is delivered,
        only later.
        """
        self._answer_later(command, answerer, partial(self._cancel, command))

    async def _cancel(self, command: Cancel) -> bytes:
        """Cancel a message; return the result for the answer.

        Raises:
            ServerError: the receipt is invalid.
            MetaqError: the outcome is unknown; the client should ask again.
        """
        receipt = parse_receipt(command.payload)
        number, offset, due_ms, message_id = receipt
        if not 0 <= number < TIERS:
            return UNKNOWN
        tier = self.tiers[number]
        found = await tier.read_head(offset)
        if found is None:
            return UNKNOWN
        head, size_bytes = found
        index = message_index(receipt, command.topic, head)
        if index is None or self._is_dropped(command.topic, number, offset):
            return UNKNOWN
        name = number, int(offset), message_id
        if name in self._cancelled:
            return CANCELLED
        key = due_ms, int(offset)
        is_over = due_ms <= self.now_ms() or key <= tier.reached
        if is_over or is_done(tier.steps, key):
            return DELIVERED
        payload = encode_cancelled(head, index, message_id, offset, size_bytes)
        self.hold((number, *key))
        try:
            error = await outcome_of(partial(self._logs.append, tier.log_id, payload))
            if error is not None:
                raise error
        finally:
            self.release((number, *key))
        self._cancelled[name] = None
        if len(self._cancelled) > REMEMBERED_MAX:
            del self._cancelled[next(iter(self._cancelled))]
        self._cancelled_count += 1
        return CANCELLED

    def show(self, command: ListScheduled, answerer: Answerer) -> None:
        """Answer with the listing of waiting messages."""
        self._answer_later(command, answerer, partial(self._list, command))

    async def _list(self, command: ListScheduled) -> bytes:
        if not self._is_unused:
            # Messages acknowledged before this call are in the second pass, which
            # begins after it.
            for _ in range(2):
                await self._followed.wait()
        async with self._listing:
            found = await list_scheduled(self.tiers, self.dropped, command)
        problems = [*self._unread()]
        if problems:
            found["problems"] = problems
        return json.dumps(found).encode()

    def _answer_later(
        self,
        command: Cancel | ListScheduled,
        answerer: Answerer,
        work: Callable[[], Coroutine[Any, Any, bytes]],
    ) -> None:
        """Run `work` in a task and answer with its result.

        Raises:
            UnavailableError: `__delays` is not read yet, or too many requests wait.
        """
        if self._state is None:
            raise UnavailableError("delayed messages are being read")
        if self._request_count >= REQUESTS_MAX:
            raise UnavailableError(
                f"{REQUESTS_MAX} requests about delayed messages wait already"
            )
        self._request_count += 1
        answerer.hold(count=1, size_bytes=0)

        async def answer() -> None:
            reply = b""
            try:
                reply = encode_result(Status.OK, await work(), command.opaque)
            except MetaqError as error:
                body = str(error).encode()
                reply = encode_result(Status.SERVER_ERROR, body, command.opaque)
            finally:
                self._request_count -= 1
                answerer.answer(reply, count=1, size_bytes=0)

        self.spawn(answer(), name="request")

    # -- time

    def _clocks(self) -> tuple[int, int]:
        clock = self._context.clock
        return clock.wall_ms(), int(clock.boot_s() * 1000)

    def now_ms(self) -> int:
        """Return the current time for comparison with due times."""
        return self._wall.look(*self._clocks())

    # -- the task

    async def on_start(self) -> None:
        """Start the task; its first ticks read the waiting messages."""
        self.spawn(self._run(), name="ticks")

    def wake(self) -> None:
        """Start the ticks: a message was scheduled, or will be by a commit."""
        self._wake.set()

    async def _run(self) -> None:
        failures = 0
        while True:
            pause_s = TICK_MS / 1000
            try:
                if await self.tick():
                    pause_s = BATCH_PAUSE_S
                if self._problem:
                    _log.info("delayed messages are delivered again")
                failures, self._problem = 0, ""
            except MetaqError as error:
                failures += 1
                # The caller retries the deletion.
                self._end_drops(list(self._drops), error)
                pause_s = RETRY.delay_s(failures)
                if not self._problem:  # once: the text may change with each try
                    _log.error("delayed messages are not delivered: %s", error)
                self._problem = str(error)
            self._end_follow()
            if self._is_unused and not failures:
                await self._wake.wait()
            await asyncio.sleep(pause_s)

    @property
    def _is_unused(self) -> bool:
        return all(tier.log is None for tier in self.tiers)

    def _end_follow(self) -> None:
        followed, self._followed = self._followed, asyncio.Event()
        followed.set()

    async def tick(self) -> bool:
        """Deliver one batch of due messages; return whether there was any.

        Raises:
            MetaqError: nothing was delivered; the messages are read again.
        """
        if self._state is None:
            self._state = await self._read_state()
        if self._drops:
            await self._drop()
        now_ms = self.now_ms()
        released, self._released = self._released, []
        for number, tier in enumerate(self.tiers):
            await self._follow(number, tier, now_ms)
        self._end_follow()
        self._held.subtract(released)
        self._held += Counter()  # removes zero counts
        batch, progress = self.take(now_ms)
        for tier, each in zip(self.tiers, progress, strict=True):
            tier.reached = each[:2]
        if not batch:
            return False
        try:
            await self._deliver(batch, progress, now_ms)
        except MetaqError:
            # The messages still wait: listings must show them.
            for number, tier in enumerate(self.tiers):
                await self._follow(number, tier, now_ms)
            raise
        return True

    def take(self, now_ms: int) -> tuple[list[DueRecord], list[Progress]]:
        """Take a batch; see `take_batch`."""
        return take_batch(self.tiers, now_ms, self._held)

    def hold(self, key: RecordKey) -> None:
        """Stop a tier before a record."""
        self._held[key] += 1

    def release(self, key: RecordKey) -> None:
        """End a `hold`, once the tier has read everything stored so far."""
        self._released.append(key)

    async def _read_state(self) -> DelayState:
        log_id = LogId(TOPIC, PROGRESS_PARTITION)
        self._context.transactions.require_ended(log_id)
        log, state = self._logs.find(log_id), DelayState()
        if log is not None:
            async for _offset, record in read_records(log):
                found = decode_state(record.payload)
                state = max(state, found, key=lambda each: each.sequence)
        return state

    async def _follow(self, number: int, tier: DelayTier, now_ms: int) -> None:
        """Bring a tier up to date; after an error, retry later."""
        assert self._state is not None, "it is read first"
        now_s = self._context.clock.monotonic_s()
        if not tier.is_loaded and now_s < tier.retry_s:
            return
        try:
            if not tier.is_loaded:
                await tier.load(self._state.steps[number])
            await tier.follow()
            if any(each.due_ms > now_ms for each in tier.late):
                steps = lowered(tier.steps, now_ms)
                if steps is not tier.steps:
                    await tier.load(steps)
                    await tier.follow()
            await tier.load_due(now_ms)
        except (StorageError, ClosedError) as error:
            self._fail_tier(tier, error)

    def _fail_tier(self, tier: DelayTier, error: MetaqError) -> None:
        _log.error("delayed messages stay: partition=%s error=%s", tier.log_id, error)
        if isinstance(error, CorruptRecordError):
            tier.drop_files()  # the damage may be in them
        tier.unload()
        tier.problem = str(error)
        tier.retry_s = self._context.clock.monotonic_s() + RETRY.max_s

    # -- delivery

    async def _deliver(
        self, batch: Sequence[DueRecord], progress: Sequence[Progress], now_ms: int
    ) -> None:
        """Commit a batch and the progress.

        Raises:
            MetaqError: nothing was stored.
        """
        assert self._state is not None, "it is read first"
        reached, taken = list(progress), {each.tier for each in batch}
        done = False
        try:
            records = [each async for each in self._read(batch, reached)]
            delivery = await self._prepare(records, now_ms)
            steps = [
                advanced(tier.steps, each) if tier.is_loaded else old
                for tier, each, old in zip(
                    self.tiers, reached, self._state.steps, strict=True
                )
            ]
            state = DelayState(self._state.sequence + 1, steps, self._dropped_left())
            await self.commit(delivery.appends, state)
            done = True
        finally:
            if not done:
                for number in taken:
                    self.tiers[number].unload()
        self._state = state
        for tier, each in zip(self.tiers, steps, strict=True):
            if tier.is_loaded:
                tier.steps = each
        self._delivered_count += delivery.delivered.total()
        self._late_ms = now_ms - min(each.record.due_ms for each in batch)
        for topic in delivery.delivered:
            self._stalled.pop(topic, None)
        self._stalled |= delivery.refused

    async def commit(
        self, appends: Sequence[JoinedRecord | JoinedBatch], state: DelayState
    ) -> None:
        """Append records and the progress atomically."""
        log_id = LogId(TOPIC, PROGRESS_PARTITION)
        record = JoinedRecord(log_id, encode_state(state))
        error = await outcome_of(partial(self._joined.append, [*appends, record]))
        if error is not None:
            raise error

    async def _read(
        self, batch: Sequence[DueRecord], reached: list[Progress]
    ) -> AsyncIterator[tuple[DueRecord, DelayHead, bytes]]:
        """Yield the records of a batch in its order.

        A tier that cannot be read is left out: its progress stays.
        """
        found = dict[tuple[int, int], tuple[DelayHead, bytes]]()
        for number in {each.tier for each in batch}:
            tier = self.tiers[number]
            try:
                wanted = [each.record for each in batch if each.tier == number]
                for offset, record in (await tier.read(wanted)).items():
                    head = decode_head(record.payload)
                    found[number, offset] = head, record.payload
                for each in wanted:
                    _require_same(each, found[number, each.offset][0])
            except (StorageError, ClosedError) as error:
                reached[number] = tier.progress
                self._fail_tier(tier, error)
        for chosen in batch:
            name = chosen.tier, chosen.record.offset
            if self.tiers[chosen.tier].is_loaded:
                yield chosen, *found[name]

    async def _prepare(
        self, records: Sequence[tuple[DueRecord, DelayHead, bytes]], now_ms: int
    ) -> _Delivery:
        groups: dict[tuple[str, int], list[tuple[DelayHead, bytes]]] = {}
        for chosen, head, payload in records:
            if not self._is_dropped(head.topic, chosen.tier, chosen.record.offset):
                body = _body_of(head, payload, chosen.cancelled)
                groups.setdefault((head.topic, head.partition), []).append((head, body))
        delivery = _Delivery([], Counter(), {})
        for (topic, partition), members in groups.items():
            await asyncio.sleep(0)
            data = bytearray().join([body for _head, body in members])
            if not data:
                continue  # all of them are cancelled
            try:
                log_id = self._target(topic, partition, SizeBytes(len(data)))
            except REFUSALS as error:
                delivery.refused[topic] = str(error)
                delivery.appends += [
                    _retry_record(head, body, now_ms) for head, body in members if body
                ]
                continue
            positions = record_positions(data)
            delivery.appends.append(JoinedBatch(log_id, data, positions))
            delivery.delivered[topic] += len(positions)
        return delivery

    def _target(self, topic: str, partition: int, size_bytes: SizeBytes) -> LogId:
        """Return the target partition, if it accepts puts now.

        Raises:
            MetaqError: it refuses them.
        """
        topics = self._context.topics
        log = topics.log_for_put(topic, topics.resolve_put(topic, partition))
        log.plan_append(size_bytes)
        return log.log_id

    # -- topics that were deleted

    def drop_topic(
        self, topic: str, on_done: Callable[[MetaqError | None], None]
    ) -> None:
        """Drop the messages that wait for a deleted topic, durably."""
        if self._is_unused:
            on_done(None)
            return
        self._drops.append((topic, on_done))
        self.wake()

    async def _drop(self) -> None:
        """Store the topics that were deleted since the last tick."""
        assert self._state is not None, "it is read first"
        ends = [0 if tier.log is None else tier.log.next_offset for tier in self.tiers]
        dropped, drops = dict(self._dropped_left()), list(self._drops)
        for topic, _on_done in drops:
            command = ListScheduled(topic, 0, 0)
            found = await list_scheduled(self.tiers, self.dropped, command)
            count = found["count"]
            _log.info("delayed messages dropped: topic=%s messages=%d", topic, count)
            dropped[topic] = tuple(ends)
        if len(dropped) > DROPPED_MAX:
            raise UnavailableError(
                f"expected at most {DROPPED_MAX} deleted topics that messages waited"
                f" for, got {len(dropped)}"
            )
        state = self._state._replace(sequence=self._state.sequence + 1, dropped=dropped)
        await self.commit([], state)
        self._state = state
        self._end_drops(drops, None)

    def _end_drops(self, drops: Sequence[Drop], error: MetaqError | None) -> None:
        """Report the outcome of deletions."""
        for each in drops:
            self._drops.remove(each)
            each[1](error)

    @property
    def dropped(self) -> Mapping[str, Sequence[int]]:
        """Return the deleted topics: of each tier, records below an offset are void."""
        return {} if self._state is None else self._state.dropped

    def _is_dropped(self, topic: str, tier: int, offset: int) -> bool:
        """Return whether the topic of a record was deleted after it was stored."""
        ends = self.dropped.get(topic)
        return ends is not None and offset < ends[tier]

    def _dropped_left(self) -> dict[str, Sequence[int]]:
        """Return the deleted topics for which messages may still wait."""
        assert self._state is not None, "it is read first"
        starts = [
            math.inf if tier.log is None else tier.log.log_start_offset
            for tier in self.tiers
        ]
        return {
            topic: ends
            for topic, ends in self._state.dropped.items()
            if any(end > start for end, start in zip(ends, starts, strict=True))
        }

    # -- what operators see

    def trim(self) -> bool:
        """Trim the tiers and the progress; return whether segments can be removed."""
        log = self._logs.find(LogId(TOPIC, PROGRESS_PARTITION))
        if log is not None and self._state is not None:
            log.trim_offset = Offset(max(0, log.high_watermark - PROGRESS_KEPT_BYTES))
        is_trimmed = [tier.trim() for tier in self.tiers]
        return any(is_trimmed)

    def status(self) -> DelayStatus:
        """Return the figures of delayed messages."""
        lead_ms = self._wall.lead_ms
        return DelayStatus(
            waiting_count=sum(tier.waiting_messages for tier in self.tiers),
            waiting_bytes=sum(tier.waiting_bytes for tier in self.tiers),
            delivered_count=self._delivered_count,
            cancelled_count=self._cancelled_count,
            late_ms=self._late_ms,
            problems=tuple(self._problems()),
            clock_problem=f"the clock has jumped by {lead_ms} ms: delayed messages"
            " follow the time before the jump"
            if lead_ms
            else "",
        )

    def _problems(self) -> Iterator[str]:
        if self._problem:
            yield f"delayed messages are not delivered: {self._problem}"
        yield from self._unread()
        for topic, text in sorted(self._stalled.items()):
            yield f"delayed messages wait for topic '{topic}': {text}"

    def _unread(self) -> Iterator[str]:
        """Yield a sentence for each tier that could not be read completely."""
        for tier in self.tiers:
            if tier.damage:
                yield f"delayed messages of {tier.log_id} are not read: {tier.damage}"


def _body_of(head: DelayHead, payload: bytes, cancelled: Sequence[int]) -> bytes:
    """Return the records of a delayed batch without the cancelled ones."""
    body = payload[head.size_bytes :]
    if not cancelled:
        return body
    starts = [*record_positions(body), len(body)]
    return b"".join(
        body[start:end]
        for index, (start, end) in enumerate(pairwise(starts))
        if index not in cancelled
    )


def _retry_record(head: DelayHead, body: bytes, now_ms: int) -> JoinedRecord:
    """Return the record that delays messages again after their target refused them."""
    tries = head.tries + 1
    due_ms = now_ms + retry_delay_ms(tries)
    count = len(record_positions(body))
    again = encode_head(due_ms, head.id, head.topic, head.partition, count, tries=tries)
    return JoinedRecord(LogId(TOPIC, tier_of(due_ms, now_ms)), again + body)


def _require_same(entry: DueEntry, head: DelayHead) -> None:
    """Check that a record matches its entry in the index.

    Raises:
        CorruptRecordError: the index was made of other bytes.
    """
    found = head.kind, head.due_ms, head.messages
    if found != (DelayKind.MESSAGES, entry.due_ms, entry.messages):
        raise CorruptRecordError(f"expected {entry}, got {head}")
