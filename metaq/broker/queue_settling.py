"""The command `settle`: acks, nacks and other outcomes of deliveries.

It is answered when all of its changes are stored and each dead letter has been tried
once. Acks in a transaction are handled by `queue_holds.py`.
"""

from dataclasses import dataclass, field
from typing import Final

from metaq.broker.acks import Answerer, wire_error
from metaq.broker.queue_groups import QueueOwner
from metaq.broker.queue_holds import QueueHold, require_acks
from metaq.broker.queue_part import ServedQueue
from metaq.errors import (
    ClosedError,
    MayBeStoredError,
    MetaqError,
    RemoteProtocolError,
    ServerError,
    StorageError,
    TransactionError,
    UnavailableError,
)
from metaq.model import Offset
from metaq.protocol.commands import Settle, Status
from metaq.protocol.encoding import encode_refusal, encode_result
from metaq.protocol.queue_frames import (
    Settlement,
    SettleVerb,
    Word,
    decode_settlements,
    encode_words,
)
from metaq.zk.group_definitions import DELAY_MS_MAX, LEASE_MS_MAX

_MS_MAX: Final = {SettleVerb.NACK: DELAY_MS_MAX, SettleVerb.EXTEND: LEASE_MS_MAX}
"""Longest delay of a nack, and longest lease of an extend."""


def settle(service: QueueOwner, command: Settle, answerer: Answerer) -> None:
    """Settle deliveries; the command is answered when that is stored.

    Raises:
        WireError: the command is refused with this text; nothing was changed.
    """
    group = service.find_group(command)
    queue = service.queue_for(group, command.partition)
    try:
        entries = decode_settlements(command.payload, command.count)
    except RemoteProtocolError as error:
        raise ServerError(str(error)) from error
    for each in [each for each in entries if each.argument]:
        ms_max = _MS_MAX.get(each.verb)
        if ms_max is not None and each.argument > ms_max:
            raise ServerError(
                f"settle: expected at most {ms_max} ms, got {each.argument} for offset"
                f" {each.offset}"
            )
    require_acks(command, entries)
    service.note_worker(group, command.worker, answerer)
    answerer.hold(count=1, size_bytes=0)
    _Settling(service, command, answerer, queue, entries).go_on()


@dataclass(slots=True, eq=False)
class _Settling:
    """A settle that is not answered yet. Used on the loop's thread."""

    _service: QueueOwner
    _command: Settle
    _answerer: Answerer
    _queue: ServedQueue
    _entries: list[Settlement]
    _words: list[Word] = field(default_factory=list)
    _waits: int = 1
    """Number of outcomes that the answer waits for."""
    _error: MetaqError | None = None
    """The first error."""

    def go_on(self) -> None:
        """Scan through the last message, settle, and answer when that is stored."""
        queue, service = self._queue, self._service
        if not service.has(queue):
            # Its state is being read again, and would not have these changes.
            self._end(UnavailableError("the queue is read again"))
            return
        if service.is_ending:
            self._end(UnavailableError("the broker stops"))
            return
        last, now = max(self._entries).offset, service.now()
        try:
            is_found = queue.scan(0, now, through=last)
        except (StorageError, ClosedError) as error:
            self._end(error)
            return
        if not is_found:
            service.spawn(self._read(), name="settle")
            return
        queue.drop_window()
        if self._command.transaction is not None:
            self._hold()
            return
        worker = self._command.worker
        self._words = queue.state.settle_all(worker, self._entries, now)
        self._waits += service.send_letters(queue, self._on_letter)
        queue.store(self._end)
        service.on_settled(queue)

    def _hold(self) -> None:
        """Hold the messages for a transaction; answer when that is journalled."""
        try:
            hold = QueueHold(self._service, self._queue, self._command, self._answerer)
        except TransactionError as error:
            self._end(error)
            return
        self._words = hold.hold(self._entries)
        hold.put(self._end)

    async def _read(self) -> None:
        try:
            await self._queue.read_ahead(1)
        except (StorageError, ClosedError) as error:
            self._end(error)
        else:
            self.go_on()

    def _on_letter(self, offset: Offset, is_stored: bool) -> None:
        if not self._service.has(self._queue):
            self._end(MayBeStoredError("the queue is read again"))
            return
        if not is_stored:
            for at, each in enumerate(self._entries):
                if each.offset == offset and self._words[at] is Word.OK:
                    self._words[at] = Word.LATER
        self._end(None)

    def _end(self, error: MetaqError | None) -> None:
        self._error = self._error or error
        self._waits -= 1
        if self._waits:
            return
        command, error = self._command, self._error
        if error is None:
            reply = encode_result(Status.OK, encode_words(self._words), command.opaque)
        elif isinstance(error, TransactionError):
            reply = encode_refusal(ServerError(str(error)), command.opaque)
        else:
            context, at = self._answerer.context, self._queue.log.log_id
            refusal = wire_error(context, error, at)
            reply = encode_refusal(refusal, command.opaque)
        self._answerer.answer(reply, count=1, size_bytes=0)
