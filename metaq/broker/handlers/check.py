"""`check`: verify stored bytes for a client that has received damaged ones.

The bytes of a get are sent from the file without being verified, so a client that
receives a damaged record does not know whether the disk or the network is at fault. It
asks here before it skips anything. The reader threads of the data directory verify the
spans and whole records that overlap the range; damage is recorded in the log, as by the
scrub. In a replica set the answer waits until the range is mended from another replica.
The answer is that of a get at this offset, without the bytes.
"""

import asyncio
from functools import partial
from typing import Final

from metaq.broker.acks import Answerer
from metaq.broker.handlers.get import MEND_S, text_of
from metaq.broker.handlers.offset import late_failure
from metaq.errors import (
    ClosedError,
    NotFoundError,
    OffsetOutOfRangeError,
    ServerError,
    StorageError,
    UnavailableError,
    WireError,
)
from metaq.model import Offset
from metaq.protocol import texts
from metaq.protocol.commands import Check, Status
from metaq.protocol.encoding import encode_result
from metaq.storage.log_state import WaitHandle
from metaq.storage.partition_log import PartitionLog
from metaq.storage.segment import Damage
from metaq.storage.slices import Slice

CHECK_BYTES_MAX: Final = 64 << 20
"""Maximum bytes verified by one check: less than a second of a reader thread."""

CHECKS_MAX: Final = 8
"""Maximum checks in progress; more are refused, because they share the reader threads
with gets that are not in the page cache."""


def handle_check(command: Check, answerer: Answerer) -> None:
    """Verify the bytes; the answer comes later.

    Raises:
        ForbiddenError: the partition is closed.
        NotFoundError: no put has made this log.
        UnavailableError: there are too many checks.
    """
    context = answerer.context
    topic, partition = command.topic, command.partition
    context.topics.require_open(topic, partition)
    log = context.topics.find_log(topic, partition)
    if log is None:
        raise NotFoundError(texts.no_such_log(topic, partition))
    if context.check_count >= CHECKS_MAX:
        raise UnavailableError(texts.too_many_checks(CHECKS_MAX))
    context.check_count += 1
    answerer.hold(count=1, size_bytes=0)
    _Check(command, log, answerer).go_on()


class _Check:
    """A check that is not answered yet. Used on the loop's thread."""

    def __init__(self, command: Check, log: PartitionLog, answerer: Answerer) -> None:
        self._command = command
        self._log = log
        self._answerer = answerer
        self._offset = Offset(command.offset)
        self._size = min(command.size, CHECK_BYTES_MAX)
        self._is_verified = False
        self._waiting: WaitHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_late = False

    def go_on(self) -> None:
        """Verify the next bytes, wait for known damage to be mended, or answer."""
        try:
            part = self._log.read(self._offset, self._size)
        except OffsetOutOfRangeError:
            self._refuse(NotFoundError(texts.nothing_at(self._offset)))
        except (StorageError, ClosedError) as error:
            self._on_refused(error)
        else:
            if self._is_verified:
                part.release()
                self._answer(Status.OK, str(self._offset + part.size_bytes))
            else:
                self._verify(part)

    def _verify(self, part: Slice) -> None:
        """Verify the bytes up to the end of their segment, or to known damage."""
        log, self._size = self._log, part.size_bytes
        work = partial(part.damage, log.high_watermark)
        closed = ServerError(f"partition {log.log_id} is being closed")

        def finish(done: asyncio.Future[tuple[Damage, ...]]) -> None:
            part.release()
            error = closed if done.cancelled() else done.exception()
            if error is not None:
                context = self._answerer.context
                self._refuse(late_failure(error, self._command, context))
                return
            self._is_verified = True
            for damage in done.result():
                log.on_damage(damage)
            self.go_on()

        try:
            future = asyncio.get_running_loop().run_in_executor(part.reader, work)
        except RuntimeError:
            part.release()
            self._refuse(closed)
        else:
            future.add_done_callback(finish)

    def _on_refused(self, error: StorageError | ClosedError) -> None:
        """Wait while another replica may have the bytes; else answer as to a get."""
        log, offset = self._log, self._offset
        if log.is_mendable(offset):
            if self._is_late:
                self._refuse(UnavailableError(texts.being_mended(log.log_id, offset)))
                return
            if self._timer is None:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(MEND_S, self._end_wait)
            self._waiting = log.wait(offset, self.go_on)
            return
        context = self._answerer.context
        self._refuse(ServerError(text_of(error, self._command, log, context)))

    def _end_wait(self) -> None:
        self._is_late = True
        if self._waiting is not None:
            self._waiting.wake()

    def _refuse(self, error: WireError) -> None:
        self._answer(error.status, str(error))

    def _answer(self, status: int, text: str) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._answerer.context.check_count -= 1
        reply = encode_result(status, text.encode(), self._command.opaque)
        self._answerer.answer(reply, count=1, size_bytes=0)
