"""Sealed segments, compared with those of another replica by their checksums.

Two copies that both agree with their own index may still differ: the bytes of one were
changed in memory, between its check of what came and the disk. An index has the
checksum of each span, and those of neighbours make that of a segment, so one number
compares a segment and no byte of it is read. Where it differs both replicas verify
their bytes: damage is mended (`mending.py`). Where both find none, an operator has to
look, and an alarm says so.
"""

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from typing import Final

from metaq.clock import Clock
from metaq.errors import MetaqError
from metaq.model import BrokerAddress, LogId, Offset
from metaq.replication.epochs import CopyFacts, parting_point
from metaq.replication.follow_task import connect
from metaq.replication.following import ask
from metaq.replication.messages import (
    SUM,
    SumReply,
    SumRequest,
    decode_sum_reply,
    encode_sum,
)
from metaq.replication.serving import Tables, facts_of
from metaq.storage.partition_log import PartitionLog
from metaq.storage.segment import Segment

_log = logging.getLogger(__name__)

SUM_S: Final = 10.0
"""Longest wait for an answer: the other replica may have to read its segment."""


async def answer_sum(
    logs: Mapping[LogId, PartitionLog], tables: Tables, asked: SumRequest
) -> SumReply:
    """Compare a segment of another replica with the own bytes.

    Where they differ, the own ones are verified before the answer.

    Raises:
        StorageError: the disk does not give them.
    """
    number = asked.copy.number
    log = next((each for each in logs.values() if each.number == number), None)
    unknown = SumReply(is_known=False, is_equal=False)
    if log is None or not tables.is_living(number) or asked.start >= asked.end:
        return unknown
    own = facts_of(log, tables)
    if asked.start < own.start or asked.end > parting_point(own, asked.copy):
        return unknown
    checksum = await _checksum(log, asked.start, asked.end)
    if checksum is None:
        return unknown
    if checksum != asked.checksum:
        await verify(log, asked.start, asked.end)
    return SumReply(is_known=True, is_equal=checksum == asked.checksum)


async def verify(log: PartitionLog, start: Offset, end: Offset) -> None:
    """Look for damage in a range of a sealed segment, and report it to the log.

    Raises:
        StorageError: the disk does not give the bytes.
    """
    part = log.read_unchecked(start, end)
    loop = asyncio.get_running_loop()
    checking = loop.run_in_executor(part.reader, partial(part.damage, end))
    checking.add_done_callback(lambda _: part.release())
    for each in await asyncio.shield(checking):
        log.on_damage(each)


async def _checksum(log: PartitionLog, start: Offset, end: Offset) -> int | None:
    part = log.read_unchecked(start, end)
    if part.size_bytes != end - start:
        part.release()
        return None
    reading = asyncio.get_running_loop().run_in_executor(part.reader, part.checksum)
    reading.add_done_callback(lambda _: part.release())
    return await asyncio.shield(reading)


class Comparison:
    """Goes through all sealed segments, one after another. Owner: the mender."""

    def __init__(self, *, clock: Clock) -> None:
        """Begin with the first segment of the first log."""
        self._clock = clock
        self._last: tuple[LogId, Offset] | None = None
        self.differing = ""
        """Copies that differ though none is damaged; "" for none."""

    def next_segment(
        self, logs: Mapping[LogId, PartitionLog]
    ) -> tuple[PartitionLog, Segment] | None:
        """Return the sealed segment after the last one; None: there is none at all."""
        keys = [
            (log_id, each.base_offset)
            for log_id, log in logs.items()
            if log.number is not None and not log.damage
            for each in log.segments.sealed
            if each.size_bytes and each.end_offset <= log.high_watermark
        ]
        if not keys:
            return None
        later = [key for key in keys if self._last is None or key > self._last]
        self._last = log_id, offset = min(later or keys)
        found = logs[log_id].segments.find(offset)
        assert found is not None, f"{log_id}: no segment holds {offset}"
        return logs[log_id], found

    async def compare(
        self,
        log: PartitionLog,
        segment: Segment,
        address: BrokerAddress,
        set_id: str,
        copy: CopyFacts,
    ) -> None:
        """Compare a segment with the copy at an address."""
        start, end = segment.base_offset, segment.end_offset
        try:
            checksum = await _checksum(log, start, end)
            if checksum is None:
                return
            request = SumRequest(set_id, copy, start, end, checksum)
            connection = await connect(address, self._clock)
            try:
                deadline_s = self._clock.monotonic_s() + SUM_S
                payload = encode_sum(request)
                answer = await ask(connection, SUM, payload, deadline_s=deadline_s)
            finally:
                connection.close("compared")
            reply = decode_sum_reply(answer)
            if not reply.is_known:
                return
            what = f"{segment.path} and the copy at {address}"
            if reply.is_equal:
                if self.differing == what:
                    self.differing = ""
                return
            _log.error("copies differ: %s", what)
            await verify(log, start, end)
            self.differing = "" if log.damage else what
        except MetaqError as error:
            _log.warning("not compared: file=%s error=%s", segment.path, error)
