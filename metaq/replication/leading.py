"""The leader's streams: each follower that has joined gets what the leader writes.

    a group is written here    -> `_on_moved` of each log  -> one turn later `_flush`:
    a follower's pull waits    -> one data message with all that it lacks
    its next pull acknowledges -> match -> bound -> high watermark -> replies to puts

A small group is sent while it is synced here, a large one after its sync. The leader's
own sync counts like that of any other replica, so a follower may have bytes that the
leader loses in a power cut. They were not acknowledged, and are truncated when a later
epoch has other bytes there. A group that did not fit on the disk is never sent, because
its offsets are used again in this epoch.

No work is done per put, or by a timer for an idle log: a follower has lists of the logs
that have something for it.

    ready     has bytes in memory, or may have
    cold      has bytes to read from the file, one log after another
    marks     the high watermark has moved: sent with the next data, or at the next tick
    missing   not caught up since the join (`LogProgress.joined`)
    lacking   has bytes that the follower lacks: up to where, and since when

Lag is measured in ticks, each counted as at most TICK_S_MAX, so that a leader that was
suspended does not conclude that all others were late.

Invariants:

* an acknowledgement counts only for the process that joined, over its connection;
* nothing is sent twice over one stream, and unsent bytes are never acknowledged;
* the reply to a join has the written end: a follower ahead of the synced end has lost
  nothing;
* the high watermark that followers allow is `LogProgress.bound` of each log, for the
  current quorum.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, TypeAlias

from metaq.errors import ClosedError, StorageError, WireError
from metaq.model import LogId, Offset
from metaq.protocol.texts import NOT_LEADER
from metaq.replication.election import Flag
from metaq.replication.facts import FollowerLag
from metaq.replication.messages import (
    JOIN,
    STALE_EPOCH,
    Chunk,
    Data,
    JoinReply,
    JoinRequest,
    LogAnswer,
    Pull,
    encode_data,
)
from metaq.replication.progress import (
    Leadership,
    LogProgress,
    answer_join,
    begin_progress,
    has_lost,
)
from metaq.replication.serving import (
    CHUNK_BYTES_MAX,
    chunk_of,
    facts_of,
    read_chunk,
    refusal,
    report,
)
from metaq.replication.tables import EpochTables
from metaq.storage.log_state import LogState
from metaq.storage.partition_log import PartitionLog
from metaq.storage.segment import DamagedSegmentError

_log = logging.getLogger(__name__)

Answer: TypeAlias = Callable[[bytes | WireError], None]
"""Gets the reply to one message, once, at once or later."""

PULLS_MAX: Final = 3
"""Maximum number of waiting pulls of one follower."""
IDLE_S: Final = 0.5
"""Time without data after which a follower gets an empty message, in seconds."""
LOADED_BYTES_MAX: Final = 4 << 20
"""Maximum size of chunks read from files ahead of one follower's pulls, in bytes."""
TICK_S_MAX: Final = 1.0
"""Longest time that one tick counts for, in seconds."""
GONE_S: Final = 1.0
"""Time without a connection after which a follower counts as stalled, in seconds."""
JOIN_STEP: Final = 100
"""Number of logs of a join handled in one turn of the loop: some milliseconds."""


class TermOwner(Protocol):
    """Interface of the replica that leads."""

    def on_join(self, replica: int, incarnation: int, revision: int) -> None:
        """Called when a follower joined; must call `set_term` with its incarnation."""

    def on_saved(self, replica: int, revision: int) -> None:
        """Called when a follower has saved this revision; as `on_join`."""

    def on_caught_up(self, replica: int) -> None:
        """Called when a follower has caught up in all logs: it may become in-sync."""

    def on_lost(self, replica: int) -> None:
        """Called when a member of the in-sync set lacks bytes that it promised."""

    def knows(self, replica: int, token: str) -> bool:
        """Return whether the node `present/K` has this token."""


@dataclass(slots=True, eq=False)
class _Follower:
    """One stream: from a join to the end of its connection."""

    replica: int
    owner: object
    """Connection of the follower."""
    sent: dict[int, Offset] = field(default_factory=dict)
    ready: dict[int, None] = field(default_factory=dict)
    cold: dict[int, None] = field(default_factory=dict)
    damaged: set[int] = field(default_factory=set)
    """Logs with unsent bytes that must be repaired first."""
    marks: dict[int, None] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)
    lacking: dict[int, tuple[Offset, float]] = field(default_factory=dict)
    """Log number → end of the oldest missing bytes, and since when; oldest first."""
    new_logs: list[LogAnswer] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    pulls: deque[tuple[Pull, Answer]] = field(default_factory=deque)
    loaded: list[Chunk] = field(default_factory=list)
    loading: "asyncio.Task[None] | None" = None
    sent_s: float = 0.0
    has_left: bool = False
    """Whether it left the in-sync set, so that its logs must be examined again."""

    @property
    def has_more(self) -> bool:
        """Whether there is something to send; if not, a pull waits."""
        has_bytes = self.ready or self.cold or self.loaded
        return bool(has_bytes or self.marks or self.new_logs or self.gone)

    def forget(self, number: int) -> None:
        """Drop a deleted log."""
        for each in (self.ready, self.cold, self.marks, self.lacking, self.sent):
            each.pop(number, None)
        self.missing.discard(number)
        self.damaged.discard(number)
        self.new_logs = [
            new for new in self.new_logs if new.answer.copy.number != number
        ]
        self.loaded = [chunk for chunk in self.loaded if chunk.number != number]


class LeadingStreams:
    """Streams to all followers in a term. Owned by the replica; used on the loop."""

    def __init__(
        self,
        logs: Mapping[LogId, PartitionLog],
        tables: EpochTables,
        owner: TermOwner,
        term: Leadership,
        *,
        set_id: str,
        lag_s: float,
    ) -> None:
        """Create the streams of a term; `begin` starts it.

        Args:
            logs: all logs, a live view.
            tables: their epochs; that of this term has begun in each log.
            owner: the replica.
            term: its initial state.
            set_id: id of the set.
            lag_s: seconds after which a silent or late follower counts as stalled.
        """
        self._loop = asyncio.get_running_loop()
        self._logs = logs
        self._tables = tables
        self._owner = owner
        self._set_id = set_id
        self._lag_s = lag_s
        self._term = term
        self._by_number: dict[int, PartitionLog] = {}
        self._progress: dict[int, LogProgress] = {}
        self._followers: dict[int, _Follower] = {}
        self._joining: dict[int, tuple[Iterator[None], object]] = {}
        """Replica → steps of its join, and its connection."""
        self._contacts: dict[int, tuple[float, bool]] = {}
        """Replica → when it was last heard, and whether its connection is open."""
        self._shared: dict[tuple[int, Offset], Chunk] = {}
        """Chunks of this flush, shared by all followers."""
        self._encoded: tuple[Data, bytes] | None = None
        """Last message of this flush; the next follower mostly gets the same."""
        self._is_flush_due = False
        self._now_s = 0.0
        self._ticked_s: float | None = None
        self._is_closed = False

    # -- the term ---------------------------------------------------------------------

    def begin(self) -> None:
        """Lead every log; its first high watermark is the start of the epoch."""
        for log in tuple(self._logs.values()):
            if self._tables.is_living(log.number) and log.state in {
                LogState.FOLLOWING,
                LogState.STOPPED,
            }:
                self._lead(log)

    def add_log(self, log: PartitionLog) -> None:
        """Lead a new log; followers create it before they get its bytes."""
        self._lead(log)
        assert log.number is not None
        progress, copy = self._progress[log.number], facts_of(log, self._tables)
        new = LogAnswer(log.log_id, answer_join(progress, copy, None))
        for each in self._followers.values():
            each.new_logs.append(new)
            each.sent[log.number] = copy.start
            each.missing.add(log.number)
        self._flush_soon()

    def lead_again(self, log: PartitionLog) -> None:
        """Lead a log that was opened again, with the same end."""
        if log.number in self._by_number:
            log.lead()
            self._set_bound(log.number)
        else:
            self._lead(log)

    def remove_log(self, number: int) -> None:
        """Drop a deleted log, whose deletion is already in the journal of epochs."""
        log = self._by_number.pop(number, None)
        self._progress.pop(number, None)
        if log is not None:
            log.on_moved = None
        for each in self._followers.values():
            each.forget(number)
            each.gone.append(number)
            self._note_joined(each)
        self._flush_soon()

    def set_term(self, term: Leadership) -> None:
        """Use another quorum from now on."""
        before, self._term = self._term, term
        if before.quorum == term.quorum:
            return
        gone = before.quorum.waited - term.quorum.waited
        for replica in gone:
            self._leave(replica)
        for each in self._by_number:
            self._set_bound(each)

    def close(self, error: WireError | None = None) -> None:
        """End the term: reply to every waiting message, and detach from all logs.

        Args:
            error: the reply; None: this replica does not lead any more.
        """
        self._is_closed = True
        for log in self._by_number.values():
            log.on_moved = None
        for each in tuple(self._followers.values()):
            self._end(each, error or refusal("This replica leads no more.", NOT_LEADER))

    # -- messages ---------------------------------------------------------------------

    def join(self, request: JoinRequest, owner: object, answer: Answer) -> None:
        """Add a follower, replacing its earlier stream.

        Args:
            request: facts of its copies.
            owner: its connection, as in `drop`.
            answer: gets a `JoinReply`.
        """
        if error := self._fault_of(request):
            answer(error)
            return
        former = self._followers.get(request.replica)
        if former is not None:
            self._end(former, refusal(f"Replica {request.replica} joined again."))
        steps = self._join(request, owner, answer)
        self._joining[request.replica] = steps, owner
        self._step(request.replica, steps, answer)

    def _fault_of(self, request: JoinRequest) -> WireError | None:
        if request.set_id != self._set_id:
            return refusal(
                f"This broker is a replica of set {self._set_id},"
                f" not of {request.set_id}."
            )
        if request.epoch != self._term.epoch:
            return self._stale(request.epoch.number)
        if not self._owner.knows(request.replica, request.token):
            return refusal(f"Replica {request.replica} is not known by its token.")
        return None

    def _stale(self, number: int) -> WireError:
        epoch = self._term.epoch.number
        text = f"The message is of epoch {number}, this leader's is {epoch}."
        return refusal(text, STALE_EPOCH, epoch=epoch)

    def _step(self, replica: int, steps: Iterator[None], answer: Answer) -> None:
        """Continue a join, unless it was replaced or the term is over."""
        if self._is_closed or self._joining.get(replica, ("",))[0] is not steps:
            answer(refusal(f"The join of replica {replica} was called off."))
        elif next(steps, self) is self:
            del self._joining[replica]
        else:
            self._loop.call_soon(self._step, replica, steps, answer)

    def _join(
        self, request: JoinRequest, owner: object, answer: Answer
    ) -> Iterator[None]:
        """Compare each log; a follower's match is the part that both copies share."""
        replica, quorum = request.replica, self._term.quorum
        # The copies of a replica that lost bytes are moved aside, so they do not count.
        is_nothing = request.flag is Flag.INCOMPLETE
        copies = {} if is_nothing else {e.copy.number: e.copy for e in request.logs}
        follower = _Follower(replica, owner)
        answers: dict[int, LogAnswer] = {}
        is_lost = False
        while left := [n for n in self._by_number if n not in answers]:
            for number in left[:JOIN_STEP]:
                log, progress = self._by_number[number], self._progress[number]
                copy = replace(facts_of(log, self._tables), end=log.log_end)
                found = answer_join(progress, copy, copies.get(number))
                is_lost |= has_lost(progress, quorum, replica, found.point)
                self._progress[number] = progress.join(replica, found.point)
                self._set_bound(number)
                answers[number] = LogAnswer(log.log_id, found)
                follower.sent[number] = max(found.point, copy.start)
            yield
        self._owner.on_join(replica, request.incarnation, request.revision)
        is_lost = is_lost and not is_nothing
        logs = tuple(each for n, each in answers.items() if n in self._by_number)
        gone = {each.copy.number for each in request.logs} & self._tables.gone
        reply = JoinReply(self._term.epoch, logs, tuple(sorted(gone)), is_lost)
        self._contacts[replica] = self._now_s, True
        answer(JOIN.encode_answer(reply))
        if is_lost:
            self._owner.on_lost(replica)
        else:
            self._begin_stream(follower, answers)

    def _begin_stream(
        self, follower: _Follower, answers: Mapping[int, LogAnswer]
    ) -> None:
        self._followers[follower.replica] = follower
        # Its first pull confirms the join, even if there are no logs.
        follower.has_left = True
        follower.sent_s = self._now_s
        follower.missing.update(self._by_number)
        for number, log in self._by_number.items():
            end, copy = log.log_end, answers[number].answer.copy
            if follower.sent[number] < end:
                follower.ready[number] = None
                follower.lacking[number] = end, self._now_s
            if log.high_watermark != copy.hw:
                follower.marks[number] = None

    def pull(self, pull: Pull, owner: object, answer: Answer) -> None:
        """Apply acknowledgements, and reply once there is data: the hot call.

        Args:
            pull: from a follower that joined over the same connection.
            owner: the connection.
            answer: gets `Data`.
        """
        follower = self._followers.get(pull.replica)
        if pull.epoch != self._term.epoch:
            answer(self._stale(pull.epoch.number))
            return
        takes = self._term.takes(pull.replica, pull.incarnation, pull.epoch)
        if follower is None or follower.owner is not owner or not takes:
            answer(refusal(f"Replica {pull.replica} has to join first."))
            return
        self._contacts[pull.replica] = self._now_s, True
        follower.pulls.append((pull, answer))
        if (pull.replica, pull.revision) not in self._term.saved:
            self._owner.on_saved(pull.replica, pull.revision)
        if follower.has_left:
            self._recheck(follower)
        for number, end in pull.acks:
            if number in self._by_number and end > follower.sent[number]:
                follower.pulls.pop()
                text = (
                    f"Log {number}: expected an acknowledgement up to"
                    f" {follower.sent[number]}, got {end}."
                )
                answer(refusal(text))
                self._end(follower, refusal(text))
                return
            self._acknowledge(follower, number, end)
        if len(follower.pulls) > PULLS_MAX:
            text = f"Expected {PULLS_MAX} pulls at most, got {len(follower.pulls)}."
            self._end(follower, refusal(text))
            return
        if follower.has_more:
            self._flush_soon()

    def drop(self, owner: object) -> None:
        """End the streams and joins of a closed connection."""
        for each in [f for f in self._followers.values() if f.owner is owner]:
            self._end(each, refusal("The connection is gone."))
        for replica in [k for k, (_, o) in self._joining.items() if o is owner]:
            del self._joining[replica]

    def _acknowledge(self, follower: _Follower, number: int, end: Offset) -> None:
        log = self._by_number.get(number)
        if log is None:
            return
        progress = self._progress[number].acknowledge(follower.replica, end)
        self._progress[number] = progress
        lacks = follower.lacking.get(number)
        if lacks is not None and end >= lacks[0]:
            del follower.lacking[number]
            if end < log.log_end:
                follower.lacking[number] = log.log_end, self._now_s
        self._set_bound(number)
        if number in follower.missing and follower.replica in progress.joined:
            follower.missing.discard(number)
            self._note_joined(follower)

    def _note_joined(self, follower: _Follower) -> None:
        if not follower.missing:
            self._owner.on_caught_up(follower.replica)

    def has_caught_up(self, replica: int) -> bool:
        """Return whether a follower has caught up in all logs, and still pulls.

        False for one that left the in-sync set, until its next pull.
        """
        follower = self._followers.get(replica)
        return follower is not None and not follower.missing and not follower.has_left

    def _recheck(self, follower: _Follower) -> None:
        """Wait again, in logs where it has all bytes, for a follower that had left."""
        follower.has_left = False
        for number, progress in tuple(self._progress.items()):
            self._acknowledge(follower, number, progress.match_of(follower.replica))
        self._note_joined(follower)

    def _leave(self, replica: int) -> None:
        """Stop waiting for a follower that left the in-sync set."""
        for number, progress in self._progress.items():
            if replica in progress.joined:
                self._progress[number] = progress.leave(replica)
                self._set_bound(number)
        follower = self._followers.get(replica)
        if follower is not None:
            follower.has_left = True
            follower.missing.update(self._by_number)

    # -- logs -------------------------------------------------------------------------

    def _lead(self, log: PartitionLog) -> None:
        assert log.number is not None, f"{log.log_id} has no number"
        log.lead()
        self._by_number[log.number] = log
        self._progress[log.number] = begin_progress(facts_of(log, self._tables))
        log.on_moved = self._on_moved
        self._set_bound(log.number)

    def _set_bound(self, number: int) -> None:
        log = self._by_number[number]
        bound = self._progress[number].bound(self._term.quorum)
        log.set_bound(log.high_watermark if bound is None else bound)

    def _on_moved(self, log: PartitionLog) -> None:
        """Handle a sync or a change of the high watermark; the hot call."""
        number, end = log.number, log.log_end
        assert number is not None
        progress = self._progress[number]
        is_marked = progress.hw != log.high_watermark
        if is_marked:
            self._progress[number] = replace(progress, hw=log.high_watermark)
        for each in self._followers.values():
            is_read = number in each.cold or number in each.damaged
            if each.sent[number] < end and not is_read:
                each.ready[number] = None
                if number not in each.lacking:
                    each.lacking[number] = end, self._now_s
                self._flush_soon()
            if is_marked:
                each.marks[number] = None
                self._flush_soon()

    # -- data -------------------------------------------------------------------------

    def _flush_soon(self) -> None:
        if not self._is_flush_due and not self._is_closed:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        for each in tuple(self._followers.values()):
            while each.pulls and self._send(each):
                pass
        self._shared.clear()
        self._encoded = None

    def _send(self, follower: _Follower, *, is_due: bool = False) -> bool:
        """Reply to one pull if there is data or `is_due`; return whether it did."""
        pull, answer = follower.pulls[0]
        chunks = self._gather(follower, pull.credit_bytes)
        has_data = chunks or follower.new_logs or follower.gone
        if not (has_data or is_due):
            return False
        follower.pulls.popleft()
        logs = [(n, self._by_number[n]) for n in follower.marks]
        data = Data(
            self._term.epoch,
            tuple((n, log.high_watermark, log.log_start_offset) for n, log in logs),
            tuple(chunks),
            tuple(follower.new_logs),
            tuple(follower.gone),
        )
        follower.marks.clear()
        follower.new_logs.clear()
        follower.gone.clear()
        follower.sent_s = self._now_s
        if self._encoded is None or self._encoded[0] != data:
            self._encoded = data, encode_data(data)
        answer(self._encoded[1])
        return True

    def _gather(self, follower: _Follower, credit_bytes: int) -> list[Chunk]:
        """Return chunks for one message; logs with more bytes take turns."""
        chunks, left = _take(follower.loaded, credit_bytes)
        for number in tuple(follower.ready):
            if left <= 0:
                break
            log, offset = self._by_number[number], follower.sent[number]
            del follower.ready[number]
            if offset >= log.log_end:
                continue
            chunk = self._shared.get((number, offset))
            if chunk is None:
                requests = log.tail(offset, min(left, CHUNK_BYTES_MAX))
                if not requests:
                    # From its file, a log gives only synced bytes.
                    if offset < log.synced_end:
                        follower.cold[number] = None
                    continue
                chunk = self._shared[number, offset] = chunk_of(log, requests)
            chunks.append(chunk)
            left -= chunk.size_bytes
            self._note_sent(follower, log, chunk)
        if follower.cold and follower.loading is None:
            follower.loading = self._loop.create_task(self._load(follower))
        return chunks

    def _note_sent(self, follower: _Follower, log: PartitionLog, chunk: Chunk) -> None:
        follower.sent[chunk.number] = chunk.end_offset
        if chunk.end_offset < log.log_end:
            follower.ready[chunk.number] = None

    async def _load(self, follower: _Follower) -> None:
        """Read chunks of cold logs ahead of the pulls, up to LOADED_BYTES_MAX."""
        try:
            while follower.cold and _size_of(follower.loaded) < LOADED_BYTES_MAX:
                number = next(iter(follower.cold))
                log, offset = self._by_number[number], follower.sent[number]
                try:
                    chunk = await read_chunk(log, offset, CHUNK_BYTES_MAX)
                except (StorageError, ClosedError, RuntimeError) as error:
                    if number not in follower.cold:
                        continue  # deleted in between
                    report(log, error)
                    if isinstance(error, DamagedSegmentError):
                        # The follower gets all other logs; `stalled` shows this one.
                        del follower.cold[number]
                        follower.damaged.add(number)
                        continue
                    # Below the log start by now, or the disk cannot read it.
                    self._end(follower, refusal(f"{log.log_id}: {error}"))
                    return
                if number in follower.cold:
                    del follower.cold[number]
                    follower.loaded.append(chunk)
                    self._note_sent(follower, log, chunk)
                    self._flush_soon()
        finally:
            follower.loading = None

    def _end(self, follower: _Follower, error: WireError) -> None:
        """End a stream; its follower joins again."""
        if self._followers.get(follower.replica) is not follower:
            return
        # One that was silent for too long stays stalled without a connection.
        late_s = GONE_S if self._is_stalled(follower.replica) else 0.0
        self._contacts[follower.replica] = self._now_s - late_s, False
        del self._followers[follower.replica]
        if follower.loading is not None:
            follower.loading.cancel()
        while follower.pulls:
            follower.pulls.popleft()[1](error)
        if follower.replica not in self._term.quorum.waited:
            self._leave(follower.replica)

    # -- time -------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Send marks without data, and empty messages; call several times a second.

        Args:
            now_s: time of the boot clock, in seconds.
        """
        if self._ticked_s is not None:
            self._now_s += min(TICK_S_MAX, max(0.0, now_s - self._ticked_s))
        self._ticked_s = now_s
        for each in tuple(self._followers.values()):
            self._recheck_mended(each)
            is_due = each.marks or self._now_s - each.sent_s >= IDLE_S
            if each.pulls and is_due:
                self._send(each, is_due=True)
            is_waited = each.has_left or each.replica in self._term.quorum.waited
            if not is_waited and self._is_stalled(each.replica):
                self._leave(each.replica)

    def _recheck_mended(self, follower: _Follower) -> None:
        """Send the logs that were repaired since their bytes could not be read."""
        for number in tuple(follower.damaged):
            offset, damage = follower.sent[number], self._by_number[number].damage
            if not any(each.covers(offset) for each in damage):
                follower.damaged.discard(number)
                follower.ready[number] = None
                self._flush_soon()

    def stalled(self) -> frozenset[int]:
        """Return the replicas that the quorum waits for and that are silent or late.

        Silent or late for `lag_s`, or without a connection for `GONE_S`. A replica that
        has not joined yet counts as heard at the beginning of the term.
        """
        return frozenset(filter(self._is_stalled, self._term.quorum.others))

    def hears_all(self) -> bool:
        """Return whether all replicas of the quorum pull, so that none has claimed.

        A claimer has ended its stream before it claims; a replica that is cut off may
        claim within `GONE_S`.
        """
        never, others = (-GONE_S, False), self._term.quorum.others
        heard = [self._contacts.get(replica, never) for replica in others]
        return all(is_there and self._now_s - s < GONE_S for s, is_there in heard)

    def _is_stalled(self, replica: int) -> bool:
        """Return whether a high watermark may have waited too long for this replica."""
        heard_s, is_connected = self._contacts.get(replica, (0.0, True))
        silent_s = self._now_s - heard_s
        if silent_s >= (self._lag_s if is_connected else GONE_S):
            return True
        follower = self._followers.get(replica)
        if follower is None:
            return False
        # Outside the in-sync set, only logs in which it has caught up wait for it.
        is_waited = replica in self._term.quorum.waited
        excused = frozenset() if is_waited else follower.missing
        late_s = self._now_s - self._lag_s
        lacking = follower.lacking.items()
        return any(s <= late_s and n not in excused for n, (_end, s) in lacking)

    def lag(self) -> tuple[FollowerLag, ...]:
        """Return the lag of each replica that joined or that the quorum waits for."""
        quorum = self._term.quorum
        rows = []
        for replica in sorted(quorum.others | {*self._followers}):
            follower = self._followers.get(replica)
            lacking = follower.lacking if follower is not None else {}
            since_s = [since_s for _end, since_s in lacking.values()]
            size = sum(
                self._by_number[n].log_end - self._progress[n].match_of(replica)
                for n in lacking
            )
            state = "in sync" if replica in quorum.confirmed else "joining"
            rows.append(
                FollowerLag(
                    replica,
                    state if follower is not None or state == "in sync" else "out",
                    follower is not None,
                    size,
                    self._now_s - min(since_s, default=self._now_s),
                )
            )
        return tuple(rows)


def _take(loaded: list[Chunk], credit_bytes: int) -> tuple[list[Chunk], int]:
    """Take chunks for one message; return them, and the remaining credit.

    The credit is 0 while chunks remain, because later bytes of their logs must not be
    sent first.
    """
    chunks: list[Chunk] = []
    while loaded and (not chunks or loaded[0].size_bytes <= credit_bytes):
        chunks.append(loaded.pop(0))
        credit_bytes -= chunks[-1].size_bytes
    return chunks, 0 if loaded else credit_bytes


def _size_of(chunks: list[Chunk]) -> int:
    return sum([each.size_bytes for each in chunks])
