"""Queue groups of a broker: their queues, workers and lease timer.

Theory of operation. A group has one `ServedQueue` for each partition of its topic on
this broker, created on first use (`queue_part.py`), and waiting takers
(`queue_takers.py`). One timer serves all leases and delays. Everything runs on the
event loop.

    load      `__queues` is read; takes and settles are refused
    reclaim   for queueReclaimMs, messages that may have been delivered before the
              restart are held: their workers reconnect and extend the leases
    serve     normal operation
    away      an append to `__queues` failed: the queues are dropped from memory and
              read again, with growing delays, until that succeeds

A worker is a name, not a connection. Its leases end queueReclaimMs after its last
connection is lost, unless it reconnects before that.

In a replica set the leader serves. Its term begins with `load`, once it is registered
and every log has all that the previous leader acknowledged: before that, a done message
could look open, and a delivered one could be unknown. When the term ends, all state is
dropped from memory.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Final

from metaq.broker.acks import Answerer, wire_error
from metaq.broker.context import BrokerContext
from metaq.broker.internal_logs import InternalLogs
from metaq.broker.joined_appends import JoinedAppends
from metaq.broker.queue_groups import OnTried, QueueGroup, filter_of, rules_of
from metaq.broker.queue_letters import Letters, stored_letters
from metaq.broker.queue_log import QUEUES, read_snapshots
from metaq.broker.queue_part import ServedQueue
from metaq.broker.queue_settling import settle
from metaq.broker.queue_skips import skip_damage
from metaq.broker.queue_status import Place, QueueGroupStatus, line_of, status_of
from metaq.broker.queue_takers import TIMER_S, Takers
from metaq.broker.wall_time import WallTime
from metaq.deadlines import Deadlines, DeadlineTimer
from metaq.errors import (
    ClosedError,
    MetaqError,
    NotFoundError,
    ServerError,
    StorageError,
    UnavailableError,
    WireError,
)
from metaq.lifecycle import Service, State
from metaq.model import LogId, Offset, no_items
from metaq.protocol import texts
from metaq.protocol.commands import Settle, Take
from metaq.queues.leases import OpenBound, Reclaim
from metaq.queues.rules import Now
from metaq.queues.state import QueueState
from metaq.queues.state_log import (
    QueueName,
    QueueSnapshots,
    StateKind,
    StateRecord,
    encode_state,
    snapshot_record,
)
from metaq.retry import Backoff, wait_set
from metaq.storage.log_state import LogState
from metaq.storage.partition_log import PartitionLog
from metaq.zk.group_definitions import QueueGroupDefinition

_log = logging.getLogger(__name__)

PINNED_BYTES_MAX: Final = 64 << 20
"""A queue whose last snapshot is this many bytes back in `__queues` is written again:
until then it keeps retention from removing the segments after that snapshot."""
RELOAD: Final = Backoff(first_s=0.2, max_s=10.0)
SETTLED_POLL_S: Final = 0.05
"""Interval at which a new leader checks that its logs are complete."""


class QueueService(Service):
    """Queue groups of one broker. Owner: the app; used on the loop's thread."""

    def __init__(self, context: BrokerContext) -> None:
        super().__init__("queues", stop_timeout_s=2.0)
        self._context = context
        clock = context.clock
        self._wall = WallTime(clock.wall_ms(), int(clock.boot_s() * 1000))
        self._journal = InternalLogs(context)
        self._definitions: Mapping[str, QueueGroupDefinition] = {}
        self._unread: Mapping[str, str] = {}
        self._groups: dict[str, QueueGroup] = {}
        self._content: QueueSnapshots | None = None
        """Content of `__queues`; None: it has to be read first."""
        self._dropped = set[str]()
        """Topics deleted before `__queues` was read."""
        self._failure = ""
        """Error of the last read or append of `__queues`; "" if it succeeded."""
        self._failures = 0
        """Consecutive failures; reset after a while without one."""
        self._workers: dict[Answerer, dict[QueueGroup, set[str]]] = {}
        """Workers of each connection."""
        self._deadlines: Deadlines[ServedQueue] = Deadlines()
        self._timer = DeadlineTimer(
            self._deadlines, clock.monotonic_s, self._on_due, together_s=TIMER_S
        )
        self._load_due = asyncio.Event()
        self._reclaims_until_ms = 0
        self._reclaim_ends: dict[LogId, Offset] = {}
        """Log ends when `__queues` was read: no earlier life delivered beyond them."""
        self._bound = OpenBound(context.config.limits.queue_open_broker_max)
        self._is_leading = context.config.replication is None
        self._is_found = False
        """Whether this leader has been registered in its term."""
        self._term = 0
        """Number of changes by `set_leading`; a read of an earlier term is dropped."""
        self.letters: Final = Letters(self, context, JoinedAppends(context))
        self.takers: Final = Takers(self, context)

    # -- the start

    async def on_start(self) -> None:
        """Read `__queues` and begin the reclaim time."""
        self.on_way_down("queues", self._end_queues)
        await self._load()
        self.spawn(self._run(), name="load")

    async def _run(self) -> None:
        """Read `__queues` whenever it is due, with growing delays after failures."""
        while True:
            calm_s = RELOAD.max_s if self._failures else None
            if not await wait_set(self._load_due, calm_s):
                _log.info("queue groups served again: partition=%s", QUEUES)
                self._failures = 0
                continue
            self._load_due.clear()
            if self._failures:
                await wait_set(self._load_due, RELOAD.delay_s(self._failures))
                self._load_due.clear()
            await self._load()

    async def _load(self) -> None:
        """Read `__queues` unless it is in memory; delete the states of deleted groups.

        In a replica set, wait first until the logs are complete.
        """
        term = self._term
        if self._context.config.replication is not None:
            await self._wait_settled(term)
        if not self._is_leading:
            return
        if self._content is None:
            log = self._journal.find(QUEUES)
            try:
                await self._wait_stored()
                self._context.transactions.require_ended(QUEUES)
                found = QueueSnapshots() if log is None else await read_snapshots(log)
            except (StorageError, ClosedError) as error:
                if term == self._term:
                    self._note_away(error)
                return
            if term != self._term:
                return
            self._failure, self._content = "", found
            logs = self._context.topics.logs()
            self._reclaim_ends = {log.log_id: log.next_offset for log in logs}
            self.restart_reclaim()
            whole = [log for log in logs if log.state is LogState.OPEN]
            self._cut({log.log_id: log.next_offset for log in whole})
        self._delete(self._is_over)
        self._dropped.clear()
        for group in self._groups.values():
            self._open_latest(group)

    async def _wait_stored(self) -> None:
        """Wait until no append to `__queues` is in flight: a read would miss it.

        This happens after a refused append, which has the queues read again while
        appends before it are still being stored; and to a new leader, whose appends in
        doubt may have numbers of queues.
        """
        log = self._journal.find(QUEUES)
        while True:
            if log is None or log.state is not LogState.OPEN or _is_stored(log):
                return
            await asyncio.sleep(SETTLED_POLL_S)

    async def _wait_settled(self, term: int) -> None:
        """Wait until the logs of this leader have all that was acknowledged."""
        replica, topics = self._context.replica, self._context.topics
        while term == self._term and self._is_leading:
            if (
                topics.refusal is None
                and (self._is_found or (replica is not None and replica.is_registered))
                and all(
                    log.is_settled
                    for log in topics.logs()
                    if log.state is LogState.OPEN
                )
            ):
                self._is_found = True
                return
            await asyncio.sleep(SETTLED_POLL_S)

    def set_leading(self, *, is_leading: bool) -> None:
        """Begin to serve when this replica leads its set; stop at once otherwise."""
        if is_leading == self._is_leading:
            return
        self._is_leading, self._is_found = is_leading, False
        self._term += 1
        self._failure, self._failures, self._content = "", 0, None
        self._dropped.clear()
        for group in self._groups.values():
            self.takers.refuse_all(
                group, self._refusal(LogId(group.definition.topic, -1))
            )
            self._forget_all(group)
        self._load_due.set()

    def _refusal(self, at: LogId) -> WireError:
        """Return the refusal of a replica that does not serve queues."""
        cause = self._context.topics.refusal or ClosedError("the term begins")
        return wire_error(self._context, cause, at)

    def restart_reclaim(self) -> None:
        """Begin the reclaim time again: clients can reach this broker from now on."""
        reclaim_ms = self._context.config.limits.queue_reclaim_ms
        until_ms = self._reclaims_until_ms = self.now().mono_ms + reclaim_ms
        for group in self._groups.values():
            for queue in group.queues.values():
                if queue.state.reclaim is not None:
                    queue.state.reclaim = queue.state.reclaim._replace(
                        until_ms=until_ms
                    )

    @property
    def is_ending(self) -> bool:
        """Whether the service stops or has failed: no task may be started."""
        return self.state not in (State.STARTING, State.RUNNING)

    async def _end_queues(self) -> None:
        for group in self._groups.values():
            self.takers.end_all(group)
            for queue in [*group.queues.values()]:
                queue.end()  # no connection is left
        self.takers.close()
        self._timer.close()

    def fail(self, error: MetaqError) -> None:
        """Drop all queues from memory, because an append of their state failed."""
        if self._content is None:
            return
        self._content = None
        self._note_away(error)
        for group in self._groups.values():
            self._forget_all(group)

    def _note_away(self, error: MetaqError) -> None:
        """Record a failure and have `__queues` read again after a delay."""
        if not self._failures:
            _log.error("queue groups not served: partition=%s error=%s", QUEUES, error)
        self._failure = str(error)
        self._failures += 1
        self._load_due.set()

    # -- definitions and topics

    def apply_groups(
        self,
        definitions: Mapping[str, QueueGroupDefinition],
        unread: Mapping[str, str] = no_items(),  # stays empty
    ) -> None:
        """Apply the definitions of the catalog.

        The state of a group is deleted if its definition says so or belongs to a later
        group of the same name. Groups without a definition stay as they are.

        Args:
            definitions: definition of each group, by name.
            unread: error of each definition that cannot be read, by name.
        """
        self._definitions, self._unread = definitions, unread
        for name, definition in definitions.items():
            group = self._groups.get(name)
            if group is not None and (
                definition.is_deleted
                or _identity(definition) != _identity(group.definition)
            ):
                del self._groups[name]
                self.takers.end_all(group)
                self._forget_all(group)
        self._delete(self._is_over)
        for name, definition in definitions.items():
            if definition.is_deleted:
                continue
            group = self._groups.setdefault(name, QueueGroup(name, definition))
            if group.definition != definition:
                group.definition = definition
                for queue in group.queues.values():
                    queue.state.rules = rules_of(definition)
                    queue.where = filter_of(definition)
            self._open_latest(group)

    def on_new_log(self, log_id: LogId) -> None:
        """Serve a new partition."""
        self._cut({log_id: Offset(0)})
        for group in self._groups.values():
            if group.definition.topic == log_id.topic:
                group.all_queues = None
                self._open_latest(group)
                self.takers.pump(group)

    def drop_topic(self, topic: str) -> None:
        """Delete the queues of a topic that was deleted."""
        for group in self._groups.values():
            if group.definition.topic == topic:
                self._forget_all(group)
        if self._content is None and self._is_leading:
            self._dropped.add(topic)
        self._delete(lambda each: each.topic == topic)

    def _open_latest(self, group: QueueGroup) -> None:
        """Open the queues of a group that starts at `latest`: that fixes the start."""
        if group.definition.start == "latest":
            for log in self._logs_of(group):
                with suppress(UnavailableError):
                    self._queue_of(group, log)

    def _is_over(self, name: QueueName) -> bool:
        """Return whether the group or the topic of a queue was deleted."""
        definition = self._definitions.get(name.group)
        if name.topic in self._dropped or self._context.topics.is_withdrawn(name.topic):
            return True  # possibly under another leader
        return definition is not None and (
            definition.is_deleted
            or _identity(definition) != (name.topic, name.generation)
        )

    def _delete(self, is_meant: Callable[[QueueName], bool]) -> None:
        """Delete the states of queues, from memory and from `__queues`."""
        content = self._content
        if content is None:
            return
        for name in [each for each in content.by_name if is_meant(each)]:
            queue_id = content.id_of(name)
            content.remove(name)
            gone = StateRecord(StateKind.DELETED, queue_id, 0, Offset(0), name=name)
            self._journal.append(QUEUES, encode_state(gone), self._on_written)

    def _cut(self, ends: Mapping[LogId, Offset]) -> None:
        """Drop the state of messages at or after the ends of logs that were cut.

        The log was created again or restored: new messages at these offsets are open.
        """
        content = self._content
        if content is None:
            return
        for name, snapshot in content.by_name.items():
            log_id = LogId(name.topic, name.partition)
            end = ends.get(log_id)
            if end is None or snapshot.end <= end:
                continue
            _log.warning(
                "queue group continues at the end of a log that has become shorter:"
                " partition=%s group=%s end=%d known=%d",
                log_id,
                name.group,
                end,
                snapshot.end,
            )
            snapshot.cut(end)
            known = snapshot_record(content.id_of(name), name, snapshot)
            self._journal.append(QUEUES, encode_state(known), self._on_written)

    def _on_written(self, error: MetaqError | None) -> None:
        if error is not None:
            self.fail(error)

    # -- commands

    def take(self, command: Take, answerer: Answerer) -> None:
        """Answer a `take`; see `Takers.take`."""
        self.takers.take(command, answerer)

    def settle(self, command: Settle, answerer: Answerer) -> None:
        """Answer a `settle`; see `queue_settling.py`."""
        settle(self, command, answerer)

    async def skip_damage(
        self, topic: str, group: str, partition: int, agreed: tuple[int, int] | None
    ) -> dict[str, object]:
        """Skip a damaged range by order of an operator; see `queue_skips.py`."""
        named = self.find_group(Take(topic, group, partition, 0, 0, 0, ""))
        queue = self.queue_for(named, partition)
        return await skip_damage(self, self._context, queue, agreed)

    # -- queues

    def find_group(self, command: Take | Settle) -> QueueGroup:
        """Return the group of a command.

        Raises:
            UnavailableError: the group is unknown here, or this broker serves no queues
                now.
            ServerError: the group belongs to another topic, or its definition cannot be
                read.
        """
        if self._context.topics.refusal is not None:
            raise self._refusal(LogId(command.topic, command.partition))
        group = self._groups.get(command.group)
        if group is None and (reason := self._unread.get(command.group)):
            raise ServerError(f"queue group '{command.group}': {reason}")
        if group is None or (
            command.generation not in (None, group.definition.generation)
        ):
            raise UnavailableError(texts.queue_group_unknown(command.group))
        topic = group.definition.topic
        if command.topic != topic:
            raise ServerError(
                f"queue group '{group.name}' is of topic '{topic}', got"
                f" '{command.topic}'"
            )
        return group

    def queues_of(self, group: QueueGroup, partition: int) -> list[ServedQueue]:
        """Return the queues that may serve a taker, by partition.

        Args:
            group: group of the taker.
            partition: as in `Take`; -1: all partitions of this broker.

        Raises:
            UnavailableError: `__queues` is not in memory.
        """
        if partition >= 0:
            log = self._context.topics.find_log(group.definition.topic, partition)
            return [] if log is None else [self._queue_of(group, log)]
        version = self._context.topics.version
        if group.all_queues is None or group.version != version:
            group.version = version
            logs = self._logs_of(group)
            group.all_queues = [self._queue_of(group, log) for log in logs]
        return group.all_queues

    def queue_for(self, group: QueueGroup, partition: int) -> ServedQueue:
        """Return the queue of one partition; raises as `queues_of`.

        Raises:
            NotFoundError: there is no such partition.
        """
        found = self.queues_of(group, partition) if partition >= 0 else []
        if not found:
            topic = group.definition.topic
            raise NotFoundError(texts.no_such_log(topic, partition))
        return found[0]

    def _logs_of(self, group: QueueGroup) -> list[PartitionLog]:
        """Return the partitions that are open for delivery."""
        is_closed, topic = self._context.topics.is_closed, group.definition.topic
        logs = self._all_logs_of(group)
        return [log for log in logs if not is_closed(topic, log.log_id.partition)]

    def _all_logs_of(self, group: QueueGroup) -> list[PartitionLog]:
        topics, topic = self._context.topics, group.definition.topic
        count = self._context.config.topic(topic).partition_count
        found = [topics.find_log(topic, partition) for partition in range(count)]
        return [log for log in found if log is not None]

    def _queue_of(self, group: QueueGroup, log: PartitionLog) -> ServedQueue:
        queue = group.queues.get(log.log_id.partition)
        if queue is not None and queue.log is log:
            return queue
        if queue is not None:  # the partition has a new log
            queue.store_now()
        name = _name_of(group, log)
        content = self._content
        if content is None:
            raise self._away()
        is_new = name not in content.by_name
        letters_topic = group.definition.dead_letter_topic
        buried = stored_letters(self._context, letters_topic, name, log)
        snapshot = content.by_name.get(name)
        if snapshot is None:
            snapshot = content.begin(name, _first_floor(group, log))
        snapshot.apply(buried)
        snapshot.incarnation += 1
        queue_id = content.id_of(name)
        limits = self._context.config.limits
        rules = rules_of(group.definition)
        if queue is not None:
            queue.state.leave_bound()
        reclaim = None
        is_known, snapshot.is_idle = is_new or snapshot.is_idle, False
        until_ms = self._reclaims_until_ms
        if self.now().mono_ms < until_ms and (not is_known or snapshot.kept()):
            end = self._reclaim_ends.get(log.log_id, log.next_offset)
            reclaim = Reclaim(end if not is_known else Offset(0), until_ms)
        state = QueueState(
            rules,
            snapshot,
            open_max=limits.queue_open_max,
            bound=self._bound,
            reclaim=reclaim,
        )
        queue = ServedQueue(
            name,
            log,
            state,
            self._journal,
            queue_id=queue_id,
            where=filter_of(group.definition),
            on_failed=self.fail,
            on_freed=partial(self.takers.pump, group),
        )
        group.queues[log.log_id.partition] = queue
        journal = self._journal.find(QUEUES)
        if is_new:
            content.starts[name] = Offset(0) if journal is None else journal.next_offset

        def opened(error: MetaqError | None) -> None:
            if error is None:
                self.takers.pump(group)

        self.watch(queue)
        queue.open(opened)
        if buried and self.has(queue):
            queue.note_done(buried)
        if not self.has(queue):  # an append failed at once, as on a disk that is full
            raise self._away()
        return queue

    def _away(self) -> UnavailableError:
        """Return the error for commands while `__queues` is not in memory."""
        cause = self._failure or "they are being read"
        return UnavailableError(f"queue groups are away: {cause}")

    def _forget(self, group: QueueGroup, queue: ServedQueue) -> None:
        """Drop a queue from memory."""
        if self._content is None:
            # A read of `__queues` may be in progress, and would miss a record appended
            # now.
            queue.give_up(UnavailableError("the queue is read again"))
        else:
            queue.store_now()
        queue.state.leave_bound()
        if group.queues.get(queue.name.partition) is queue:
            del group.queues[queue.name.partition]
        group.all_queues = None
        group.stop_waiting(queue.name.partition)
        self._deadlines.clear(queue)

    def _forget_all(self, group: QueueGroup) -> None:
        for queue in [*group.queues.values()]:
            self._forget(group, queue)

    def has(self, queue: ServedQueue) -> bool:
        """Return whether this queue is still the one in memory."""
        group = self._groups.get(queue.name.group)
        return group is not None and (group.queues.get(queue.name.partition) is queue)

    def send_letters(self, queue: ServedQueue, on_tried: OnTried | None = None) -> int:
        """Send the dead letters of a queue; return their number."""
        return self.letters.send(queue, on_tried)

    def letter_topic(self, queue: ServedQueue) -> str | None:
        """Return the dead-letter topic of a queue; None: its messages are dropped."""
        group = self._groups.get(queue.name.group)
        return None if group is None else group.definition.dead_letter_topic

    def on_settled(self, queue: ServedQueue) -> None:
        """Set the timer of the next lease, and deliver what has become available."""
        if self.has(queue):
            self.watch(queue)
            self.takers.pump(self._groups[queue.name.group])

    # -- workers

    def note_worker(self, group: QueueGroup, name: str, answerer: Answerer) -> None:
        """Register a connection of a worker; its leases last their whole time again."""
        answerers = group.workers.setdefault(name, set())
        if answerer not in answerers:
            answerers.add(answerer)
            self._workers.setdefault(answerer, {}).setdefault(group, set()).add(name)
            for queue in group.queues.values():
                queue.state.leases.restore(name)

    def drop(self, answerer: Answerer) -> None:
        """Remove an ended connection: its takers, and the leases of its workers.

        A worker without another connection keeps its leases for queueReclaimMs.
        """
        end_ms = self.now().mono_ms + self._context.config.limits.queue_reclaim_ms
        for group, names in self._workers.pop(answerer, {}).items():
            self.takers.drop(group, answerer)
            for name in names:
                group.workers[name].discard(answerer)
                if group.workers[name]:
                    continue
                del group.workers[name]
                for queue in group.queues.values():
                    queue.state.leases.cut_short(name, end_ms)
                    self.watch(queue)

    # -- time

    def now(self) -> Now:
        """Return both clocks; a jump of the wall clock takes effect after a while."""
        clock = self._context.clock
        wall_ms = self._wall.look(clock.wall_ms(), int(clock.boot_s() * 1000))
        return Now(int(clock.monotonic_s() * 1000), wall_ms)

    def watch(self, queue: ServedQueue) -> None:
        """Set the timer for the next lease or delay of a queue."""
        due_ms = queue.state.next_due_ms()
        if due_ms is None:
            return
        due_s, known_s = due_ms / 1000, self._deadlines.get(queue)
        if known_s is None or due_s < known_s:
            self._deadlines.set(queue, due_s)
            self._timer.start()

    def _on_due(self, due: list[ServedQueue]) -> None:
        now = self.now()
        groups = set[QueueGroup]()
        for queue in due:
            queue.state.on_time(now)
            self.send_letters(queue)
            queue.store()
            self.watch(queue)
            group = self._groups.get(queue.name.group)
            if group is not None:
                groups.add(group)
        for group in groups:
            self.takers.pump(group)

    def tick(self) -> None:
        """Once a second: retry dead letters, write snapshots that are due, and trim."""
        for group in self._groups.values():
            # The replica may have learned by now whether it still leads.
            self.takers.pump(group)
            for queue in [*group.queues.values()]:
                self._tend(group, queue)
        self.letters.retry()  # last: no snapshot is written while letters are stored
        log = self._journal.find(QUEUES)
        if log is not None and self._content is not None:
            starts = self._content.starts.values()
            log.trim_offset = min(starts, default=log.high_watermark)

    def _tend(self, group: QueueGroup, queue: ServedQueue) -> None:
        content, log = self._content, self._journal.find(QUEUES)
        if content is None or log is None:
            return
        queue.trim(self.now())
        start = content.starts.get(queue.name, log.next_offset)
        if queue.wants_snapshot or start < log.next_offset - PINNED_BYTES_MAX:
            self._snapshot(content, queue, log.next_offset)
        elif queue.state.needs_new_incarnation and not queue.letters_open:
            content.by_name[queue.name] = queue.state.snapshot(self.now())
            self._forget(group, queue)  # the next command opens a new incarnation

    @property
    def wants_trim(self) -> bool:
        """Whether the first segment of `__queues` may be removed."""
        log = self._journal.find(QUEUES)
        return log is not None and bool(
            log.segments.sealed and log.segments.first.end_offset <= log.trims_to
        )

    def _snapshot(
        self, content: QueueSnapshots, queue: ServedQueue, start: Offset
    ) -> None:
        def stored(error: MetaqError | None) -> None:
            if error is None:
                content.starts[queue.name] = start

        queue.snapshot(self.now(), stored)

    # -- what operators see

    def problems(self) -> tuple[str, ...]:
        """Return one sentence for each problem that needs an operator."""
        failure = self._failure
        away = [f"queue groups in {QUEUES}: {failure}"] if failure else []
        stopped = [
            f"{queue}: {queue.problem}"
            for group in self._groups.values()
            for queue in group.queues.values()
            if queue.problem
        ]
        return (*away, *stopped, *self.letters.problems())

    def require_read(self) -> None:
        """Raise UnavailableError if `lines` would be incomplete."""
        if self._groups and self._is_leading and self._content is None:
            raise self._away()

    def lines(self) -> list[str]:
        """Return the lines of `stats queues`: one for each group and partition."""
        return [
            line_of(group, log, queue, floor)
            for _, group in sorted(self._groups.items())
            for log, queue, floor in self._floors(group)
        ]

    def status(self) -> tuple[QueueGroupStatus, ...]:
        """Return the figures of each group, by name."""
        now = self.now()
        return tuple(
            status_of(group, self._floors(group), now)
            for _, group in sorted(self._groups.items())
        )

    def _floors(self, group: QueueGroup) -> Iterator[Place]:
        """Yield each partition of a group with its queue, if in memory, and floor."""
        for log in self._all_logs_of(group):
            queue = group.queues.get(log.log_id.partition)
            if queue is not None:
                yield log, queue, queue.state.floor
                continue
            name = _name_of(group, log)
            if self._content is not None:
                snapshot = self._content.by_name.get(name)
                yield (
                    log,
                    None,
                    _first_floor(group, log) if snapshot is None else snapshot.floor,
                )


def _identity(definition: QueueGroupDefinition) -> tuple[str, int]:
    """Return the parts of a definition that `alter` cannot change, besides the name."""
    return definition.topic, definition.generation


def _first_floor(group: QueueGroup, log: PartitionLog) -> Offset:
    """Return the floor of a queue without stored state."""
    is_late = group.definition.start == "latest"
    return log.high_watermark if is_late else log.log_start_offset


def _is_stored(log: PartitionLog | None) -> bool:
    """Return whether no append to a log is in flight."""
    return log is None or log.high_watermark == log.next_offset


def _name_of(group: QueueGroup, log: PartitionLog) -> QueueName:
    topic, partition = log.log_id.topic, log.log_id.partition
    return QueueName(group.name, topic, partition, group.definition.generation)
