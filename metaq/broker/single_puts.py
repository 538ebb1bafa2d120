"""Gathers single puts of many connections and appends them together.

Theory of operation. Most clients have one put in flight. Each put needs its own read
and reply; its own append, ticket and request to the storage thread would cost several
times as much. So puts that were received alone are gathered here, and appended when the
loop has served all readable sockets: one run for each log, with one ticket, for the
puts of all connections.

    each socket        read, parse, check, gather      session.py, hot_puts.py
    end of the pass    ids, headers, append            for each log
    when it is stored  reply, reply, reply, ...        to all connections

Ids and offsets are assigned when the run is appended, so they have the order of the
log. A connection has at most one put in a run, so its order needs no care.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeAlias

from metaq.broker.acks import PUT_OVERHEAD_BYTES, Answerer, count_puts, refuse_put
from metaq.broker.context import BrokerContext
from metaq.errors import ClosedError, NoSpaceError, ServerError, StorageError
from metaq.model import MessageId, SizeBytes
from metaq.protocol import texts
from metaq.protocol.encoding import encode_result
from metaq.protocol.put_replies import encode_put_replies_apart
from metaq.record.ids import ids_from
from metaq.record.layout import HEADER_BYTES, encode_records, record_starts
from metaq.storage.partition_log import PartitionLog

SINGLE_BYTES_MAX: Final = 8 * 1024
"""Maximum size of a gathered put, in bytes; larger ones would gain little."""

RUN_MAX: Final = 128
"""Maximum number of puts of a run: with 1 MiB, no more than the disk takes at once."""

SINGLE_OVERHEAD_BYTES: Final = HEADER_BYTES + PUT_OVERHEAD_BYTES
"""Bytes that a put counts in the in-flight bounds in addition to its payload."""

_log = logging.getLogger(__name__)

SinglePut: TypeAlias = tuple[Answerer, bytes, int, int, bytes]
"""Session, payload, checksum, flag, opaque in the form of replies. A plain tuple,
because one is made for each put."""


class SinglePuts:
    """Puts gathered in this pass over the sockets. Used on the loop's thread."""

    def __init__(
        self,
        context: BrokerContext,
        call_at_end: Callable[[Callable[[], None]], object],
    ) -> None:
        """Create it without puts.

        Args:
            context: parts of the broker.
            call_at_end: calls back at the end of the pass over readable sockets.
        """
        self._context = context
        self._call_at_end = call_at_end
        self._gathered: dict[PartitionLog, list[SinglePut]] = {}

    def add(self, log: PartitionLog, put: SinglePut) -> None:
        """Gather a put whose checksum has been verified.

        It is always answered by `Answerer.answer`, after this call. Its session must
        count SINGLE_OVERHEAD_BYTES and the payload as in flight until then.
        """
        puts = self._gathered.get(log)
        if puts is None:
            if not self._gathered:
                self._call_at_end(self._append_all)
            puts = self._gathered[log] = []
        puts.append(put)

    def _append_all(self) -> None:
        gathered, self._gathered = self._gathered, {}
        for log, puts in gathered.items():
            for first in range(0, len(puts), RUN_MAX):
                self._append(log, puts[first : first + RUN_MAX])

    def _append(self, log: PartitionLog, puts: Sequence[SinglePut]) -> None:
        """Append a run; if refused, its puts are answered at once."""
        count, offset = len(puts), log.next_offset
        ticket = SingleTicket(self._context, log, puts)
        try:
            _, payloads, checksums, flags, _ = zip(*puts, strict=True)
            ticket.ids = ids_from(self._context.ids.reserve(count), count)
            records = encode_records(payloads, checksums, ticket.ids, flags)
            ticket.offsets = record_starts(payloads, offset)
            size_bytes = ticket.offsets.pop() - offset
            count_puts(
                self._context,
                log.log_id.topic,
                count=count,
                payload_bytes=size_bytes - HEADER_BYTES * count,
            )
            log.append(
                [records],
                size_bytes=SizeBytes(size_bytes),
                record_count=count,
                last_id=MessageId(ticket.ids[-1]),
                ticket=ticket,
                is_light=True,  # its connections have nothing else in flight
            )
        except (StorageError, ClosedError) as error:
            ticket.on_failed(error)
        except MemoryError:
            ticket.on_failed(NoSpaceError(f"no memory to append {len(puts)} messages"))
        except Exception as error:  # noqa: BLE001  # a bug of one log costs no other
            self._context.counters.error_count += 1
            log_id, count = log.log_id, len(puts)
            _log.error(
                "puts failed: partition=%s count=%d", log_id, count, exc_info=error
            )
            ticket.on_failed(ServerError(texts.INTERNAL_ERROR))


class SingleTicket:
    """Ticket of a run of single puts; one callback is called, once, on the loop."""

    __slots__ = ("_appended_s", "_context", "_log", "_puts", "ids", "offsets")

    def __init__(
        self, context: BrokerContext, log: PartitionLog, puts: Sequence[SinglePut]
    ) -> None:
        self._context = context
        self._log = log
        self._puts = puts
        self.ids: list[int] = []
        """Ids of the puts, set before the append; so are the offsets."""
        self.offsets: list[int] = []
        self._appended_s = context.clock.monotonic_s()

    def on_stored(self) -> None:
        """Answer 200: the bytes are durable under the topic's policy."""
        context, puts = self._context, self._puts
        ids, offsets = self.ids, self.offsets
        partition = self._log.log_id.partition
        waited_s = context.clock.monotonic_s() - self._appended_s
        context.put_latency.record(waited_s, len(puts))
        try:
            replies = encode_put_replies_apart(
                partition, [put[-1] for put in puts], ids, offsets
            )
        except MemoryError:
            self._answer_each(
                lambda k: encode_put_replies_apart(
                    partition, [puts[k][-1]], ids[k : k + 1], offsets[k : k + 1]
                )[0]
            )
            return
        self._answer(replies)

    def on_failed(self, error: StorageError | ClosedError | ServerError) -> None:
        """Refuse every put of the run."""
        log_id, puts = self._log.log_id, self._puts
        try:
            refusal = refuse_put(self._context, error, log_id, len(puts))
            status, body = refusal.status, str(refusal).encode()
        except MemoryError:
            for answerer, *_ in puts:
                answerer.run_out()
            self._answer([b""] * len(puts))
            return
        self._answer_each(lambda k: encode_result(status, body, int(puts[k][-1])))

    def _answer_each(self, encode: Callable[[int], bytes]) -> None:
        """Answer puts one by one; without memory for a reply, close its connection."""

        def replies() -> Iterator[bytes]:
            for number, (answerer, *_) in enumerate(self._puts):
                reply = b""
                try:
                    reply = encode(number)
                except MemoryError:
                    answerer.run_out()
                yield reply

        self._answer(replies())

    def _answer(self, replies: Iterable[bytes]) -> None:
        for (answerer, payload, *_), reply in zip(self._puts, replies, strict=True):
            size_bytes = SINGLE_OVERHEAD_BYTES + len(payload)
            answerer.answer(reply, count=1, size_bytes=size_bytes)
