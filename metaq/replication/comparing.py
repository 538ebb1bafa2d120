"""Comparison of sealed segments with those of another replica, by checksum.

Two copies that each agree with their own index may still differ: the bytes of one may
have changed in memory between the check on arrival and the write. An index has the
checksum of each span, and adjacent ones combine to that of a segment, so one number
compares a segment without reading its bytes. If the numbers differ, both replicas
verify their bytes: damage is repaired (`mending.py`). If neither finds damage, an alarm
asks an operator to look.
"""

import logging
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Final

from metaq.clock import Clock
from metaq.errors import MetaqError
from metaq.model import BrokerAddress, LogId, Offset
from metaq.replication.epochs import CopyFacts, divergence_point
from metaq.replication.follow_task import connected
from metaq.replication.following import ask
from metaq.replication.messages import SUM, SumReply, SumRequest
from metaq.replication.serving import facts_of, find_log
from metaq.replication.tables import EpochTables
from metaq.storage.partition_log import PartitionLog
from metaq.storage.segment import Segment

_log = logging.getLogger(__name__)

LOGS_MAX: Final = 200
"""Maximum number of logs examined in one turn in search of a sealed segment."""
SUM_S: Final = 10.0
"""Longest wait for a reply, in seconds; the peer may have to read a segment."""


async def answer_sum(
    logs: Mapping[LogId, PartitionLog], tables: EpochTables, asked: SumRequest
) -> SumReply:
    """Compare a segment of another replica with the own bytes.

    If they differ, the own bytes are verified before the reply.

    Raises:
        StorageError: the disk cannot read them.
    """
    number = asked.copy.number
    log = find_log(logs, number)
    unknown = SumReply(is_known=False, is_equal=False)
    if log is None or not tables.is_living(number) or asked.start >= asked.end:
        return unknown
    own = facts_of(log, tables)
    if asked.start < own.start or asked.end > divergence_point(own, asked.copy):
        return unknown
    checksum = await _checksum(log, asked.start, asked.end)
    if checksum is None:
        return unknown
    if checksum != asked.checksum:
        await verify(log, asked.start, asked.end)
    return SumReply(is_known=True, is_equal=checksum == asked.checksum)


async def verify(log: PartitionLog, start: Offset, end: Offset) -> None:
    """Search a range of a sealed segment for damage, and report it to the log.

    Raises:
        StorageError: the disk cannot read the bytes.
    """
    part = log.read_unchecked(start, end)
    for each in await part.run(partial(part.damage, end)):
        log.on_damage(each)


async def _checksum(log: PartitionLog, start: Offset, end: Offset) -> int | None:
    part = log.read_unchecked(start, end)
    if part.size_bytes != end - start:
        part.release()
        return None
    return await part.run(part.checksum)


def _sealed_in(
    logs: Mapping[LogId, PartitionLog],
) -> Iterator[tuple[PartitionLog, Segment] | None]:
    """Yield the sealed segments of all logs; each log is read when its turn comes.

    Yields None after every `LOGS_MAX` logs: thousands may have no sealed segment.
    """
    for count, log_id in enumerate(tuple(logs), 1):
        if not count % LOGS_MAX:
            yield None
        log = logs.get(log_id)
        if log is None or log.number is None:
            continue
        for each in log.segments.sealed:
            if logs.get(log_id) is not log or log.damage:
                break
            if _holds(log, each) and each.end_offset <= log.high_watermark:
                yield log, each


def _holds(log: PartitionLog, segment: Segment) -> bool:
    return log.segments.find(segment.base_offset) == segment


class Comparison:
    """Iterates over all sealed segments, one after another. Owned by the mender."""

    def __init__(self, *, clock: Clock) -> None:
        """Start with the first segment of the first log."""
        self._clock = clock
        self._pass: Iterator[tuple[PartitionLog, Segment] | None] = iter(())
        """The segments not yet compared in this pass."""
        self.differing = ""
        """Names of two copies that differ although neither is damaged; "" for none."""
        self._pair: tuple[PartitionLog, Segment, int] | None = None
        """Log and segment of the differing own copy, and the replica of the other."""

    def next_segment(
        self, logs: Mapping[LogId, PartitionLog], others: Collection[int]
    ) -> tuple[PartitionLog, Segment] | None:
        """Return the sealed segment after the last one; None: none found in this turn.

        Args:
            logs: the own logs.
            others: the other replicas of the set, including absent ones.
        """
        if self._pair and self._pair[2] not in others:
            self._end()
        for found in self._pass:
            return found
        if self._pair:
            log, segment, _ = self._pair
            if log not in logs.values() or not _holds(log, segment):
                self._end()
        self._pass = _sealed_in(logs)
        return next(self._pass, None)

    async def compare(
        self,
        log: PartitionLog,
        segment: Segment,
        other: tuple[int, BrokerAddress],
        set_id: str,
        copy: CopyFacts,
    ) -> None:
        """Compare a segment with the copy of another replica, at its address."""
        replica, address = other
        start, end = segment.base_offset, segment.end_offset
        try:
            checksum = await _checksum(log, start, end)
            if checksum is None:
                return
            request = SumRequest(set_id, copy, start, end, checksum)
            async with connected(address, self._clock) as connection:
                reply = await ask(
                    connection, SUM, request, clock=self._clock, timeout_s=SUM_S
                )
            if not reply.is_known:
                return
            if reply.is_equal:
                # The other replica may have started again, empty or on another machine.
                if self._pair == (log, segment, replica):
                    self._end()
                return
            what = f"{segment.path} and the copy at {address}"
            _log.error("copies differ: %s", what)
            await verify(log, start, end)
            self.differing = "" if log.damage else what
            self._pair = log, segment, replica
        except MetaqError as error:
            _log.warning("not compared: file=%s error=%s", segment.path, error)

    def _end(self) -> None:
        """Record that no copies differ any more."""
        self.differing, self._pair = "", None
