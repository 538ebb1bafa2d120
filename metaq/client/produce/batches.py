"""Batches of messages for one partition, and the futures of their callers.

Theory of operation. A million messages a second leave no time for work per message in
an object. So a message is one element of its batch's list of payloads, and a
`SendFuture` only refers to it: the batch, and the index in the batch. When its requests
are answered, the batch gets one outcome per request: one `mput`, or a run of puts. For
an `mput` the id and offset of each message are computed from those of the first one
(`record.ids.id_after`, and the lengths before it); for puts they are two columns.

    Invariant: a sealed batch is resolved exactly once, as a
    whole, on the loop's thread.
"""

import asyncio
import contextlib
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, repeat
from operator import and_, itemgetter
from struct import Struct
from typing import Any, Final, NamedTuple, overload

from metaq.client.errors import OutcomeUnknownError, PartlySentError
from metaq.client.timeouts import finish
from metaq.client.validation import check_timeout
from metaq.errors import ClosedError, MetaqError, RequestTimeoutError
from metaq.model import MessageId, Millis, Offset, TopicPartition
from metaq.record.checksum import CHECKSUM_MASK, crc32
from metaq.record.ids import id_after
from metaq.record.layout import HEADER, HEADER_BYTES

_PLAIN_HEADER: Final = Struct(">ii12x")
"""Header without id and flag."""


class SendResult(NamedTuple):
    """Partition, offset and id of a message that a broker has acknowledged."""

    message_id: MessageId
    """Id that the broker stamped."""
    partition: TopicPartition
    """Partition that has the message."""
    offset: Offset
    """Offset of its record's first byte."""


class BatchOutcome(NamedTuple):
    """Outcome of the messages of a batch from `first` up to the next outcome."""

    first: int
    result: SendResult | MetaqError
    """Result of the first message; an error applies to all."""
    ids: Sequence[int] | None = None
    """Id of each message, if they were single puts, delayed or sent to an exchange."""
    offsets: Sequence[int] | None = None
    """Offset of each message, likewise."""


class BatchName(NamedTuple):
    """Producer and sequence given by the caller; the same in every run of it."""

    producer: str
    """1..64 of [A-Za-z0-9._~-]."""
    sequence: int
    """Sequence of the batch's first message, 0 or more."""
    spare: str | None
    """Producer to use if these sequences were used for other messages; or None."""


@dataclass(slots=True)
class Home:
    """The event loop that resolves batches, and the lock that guards them all."""

    lock: threading.Lock
    """Guards the callbacks of every batch; held briefly."""
    loop: asyncio.AbstractEventLoop
    thread_id: int
    pid: int = field(default_factory=os.getpid)

    def is_here(self) -> bool:
        """Return whether the caller runs on the loop's thread."""
        return threading.get_ident() == self.thread_id

    def require_own(self) -> None:
        """Raise in a forked child, where no batch is ever resolved.

        Raises:
            ClosedError: the loop belongs to another process.
        """
        pid = os.getpid()
        if pid != self.pid:
            raise ClosedError(
                f"this message was sent by process {self.pid}, and this is process"
                f" {pid}: its outcome is known there"
            )

    def require_loop(self) -> None:
        """As `require_own`; also raise OutcomeUnknownError if the loop is closed."""
        self.require_own()
        if self.loop.is_closed():
            raise OutcomeUnknownError(
                "the event loop was closed before the client; outcome unknown"
            )


class Batch:
    """Messages for one partition that are sent together.

    Owner: the accumulator until it is sealed, then one partition sender at a time.
    """

    __slots__ = (
        "_callbacks", "_ends", "_home", "_outcomes", "bytes_left", "created_s",
        "deadline_s", "flags", "found", "may_move", "name", "payloads", "requests_left",
        "reserved_bytes", "reserved_count", "timeout_s", "times",
    )  # fmt: skip

    def __init__(self, home: Home, *, created_s: float, timeout_s: float) -> None:
        self._home = home
        self._callbacks: dict[Callable[[], object], None] = {}
        self._outcomes: Sequence[BatchOutcome] | None = None
        self._ends: Sequence[int] = ()
        self.created_s = created_s
        self.timeout_s = timeout_s
        self.deadline_s = created_s + timeout_s
        self.may_move = True
        """Whether all of its messages may go to another partition."""
        self.name: BatchName | None = None
        """Set by the caller; with None the delivery chooses producer and sequence."""
        self.times: list[Millis] = []
        """Delivery time of each message; [] if they are not delayed."""
        self.payloads: list[bytes] = []
        self.flags: dict[int, int] = {}
        """Flags other than 0, by the message's index in the batch."""
        self.reserved_bytes = 0
        """Buffer memory reserved for this batch, in record bytes."""
        self.reserved_count = 0
        """The same in messages."""
        self.bytes_left = 0
        """Reserved bytes that no message uses yet."""
        self.requests_left = 1
        """Number of requests without an outcome; more than one once it is cut."""
        self.found: list[BatchOutcome] = []
        """Outcomes of the settled requests, in any order."""

    @property
    def size_bytes(self) -> int:
        """Return the record bytes of its messages."""
        return self.reserved_bytes - self.bytes_left

    @property
    def is_done(self) -> bool:
        """Return whether its outcomes are known."""
        return self._outcomes is not None

    @property
    def outcomes(self) -> Sequence[BatchOutcome]:
        """Return the outcomes, ascending by `first`; () before they are known."""
        return self._outcomes or ()

    def resolve(self, outcomes: Sequence[BatchOutcome]) -> None:
        """Set the outcomes and call all callbacks; on the loop's thread.

        Args:
            outcomes: at least one, ascending; the first begins at message 0.
        """
        with self._home.lock:
            self._outcomes = outcomes
            callbacks, self._callbacks = self._callbacks, {}
        for callback in callbacks:
            callback()

    def add_callback(self, callback: Callable[[], object]) -> None:
        """Call back on the loop's thread when the batch is done; if it is, here.

        Args:
            callback: must neither raise nor wait; unequal to every other one.
        """
        with self._home.lock:
            if self._outcomes is None:
                self._callbacks[callback] = None
                return
        callback()

    def remove_callback(self, callback: Callable[[], object]) -> None:
        """Remove a callback; no effect if it was called."""
        if self._outcomes is None:
            with self._home.lock:
                self._callbacks.pop(callback, None)

    def call_later(self, function: Callable[..., object], argument: object) -> None:
        """Have the loop call a user's function, which may raise, when it is done.

        Raises:
            ClosedError: called in a forked child.
        """
        self._home.require_own()

        def call() -> None:
            with contextlib.suppress(RuntimeError):
                self._home.loop.call_soon_threadsafe(function, argument)
                return
            # The client and its loop are closed.
            function(argument)

        self.add_callback(call)

    def wait(self, timeout_s: float | None) -> bool:
        """Block until the batch is done; return False on a time-out.

        Raises:
            RuntimeError: called on the loop's thread, which would wait for itself.
            ClosedError, OutcomeUnknownError: as `Home.require_loop`.
        """
        if self._outcomes is not None:
            return True
        self._home.require_loop()
        if self._home.is_here():
            raise RuntimeError("the event loop cannot wait for itself; use await")
        # Costs a third of a threading.Event; half of that would delay the result.
        done = threading.Lock()
        done.acquire()
        self.add_callback(done.release)
        try:
            return done.acquire(timeout=-1 if timeout_s is None else max(0, timeout_s))
        finally:
            self.remove_callback(done.release)

    async def wait_async(self) -> None:
        """Wait until the batch is done; on any event loop.

        Raises:
            ClosedError, OutcomeUnknownError: as `Home.require_loop`.

        Cancellation: ends the wait; the messages are still sent.
        """
        if self._outcomes is not None:
            return
        self._home.require_loop()
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        settle = partial(finish, waiter, None)
        if loop is not self._home.loop:
            if not self._home.loop.is_running():
                raise OutcomeUnknownError(
                    "the event loop of the client does not run; outcome unknown"
                )
            settle = partial(_settle_elsewhere, loop, waiter)
        self.add_callback(settle)
        try:
            await waiter
        finally:
            self.remove_callback(settle)

    def outcome(self, at: int) -> SendResult | MetaqError:
        """Return the outcome of the message at index `at` of a batch that is done."""
        outcomes = self._outcomes
        assert outcomes is not None
        found = outcomes[0]
        if len(outcomes) > 1:
            found = outcomes[bisect_right(outcomes, at, key=itemgetter(0)) - 1]
        first, result, ids, offsets = found
        if at == first or not isinstance(result, SendResult):
            return result
        if ids is not None and offsets is not None:
            message_id, offset = ids[at - first], offsets[at - first]
            found_at = MessageId(message_id), result.partition, Offset(offset)
            # `Scheduled` has the message's own delivery time as its fourth field.
            return type(result)(*found_at, *self.times[at : at + 1], *result[4:])
        return SendResult(
            id_after(result.message_id, at - first),
            result.partition,
            Offset(result.offset + self.size_of(first, at)),
        )

    @property
    def ends(self) -> Sequence[int]:
        """Return where each message starts in record bytes, then where the last ends.

        Of a sealed batch. The first element may be above 0: only differences count.
        """
        ends = self._ends
        if len(ends) <= len(self.payloads):
            # Two threads may do this at once, with the same result.
            ends = self._ends = ends_of(self.payloads)
        return ends

    def add(
        self,
        payloads: Sequence[bytes],
        flags: Sequence[int] | None,
        ends: Sequence[int],
    ) -> None:
        """Add messages for which memory is reserved.

        Args:
            payloads: at least one.
            flags: one for each payload; None when all are 0.
            ends: see `ends_of`; may begin above 0.
        """
        if not self.payloads:
            self._ends = ends
        if flags is not None:
            numbered = enumerate(flags, len(self.payloads))
            self.flags.update((at, flag) for at, flag in numbered if flag)
        self.payloads += payloads
        self.bytes_left -= ends[-1] - ends[0]

    def size_of(self, first: int, end: int) -> int:
        """Return the record bytes of its messages from `first` up to `end`."""
        return self.ends[end] - self.ends[first]

    def encode(self, first: int, end: int) -> bytes:
        """Return its messages from `first` up to `end` as records of an `mput`."""
        payloads, flags = self.payloads, None
        if self.flags:
            flags = [self.flags.get(at, 0) for at in range(first, end)]
        if end - first < len(payloads):
            payloads = payloads[first:end]
        return encode_records(payloads, flags, self.own_times(first, end))

    def own_times(self, first: int, end: int) -> Sequence[int]:
        """Return the delivery times of messages; () if none or all have the same."""
        times = self.times[first:end]
        return times if len(set(times)) > 1 else ()


def ends_of(payloads: Sequence[bytes]) -> Sequence[int]:
    """Return 0, and after each payload the record bytes up to its end.

    Args:
        payloads: at least one.
    """
    sizes = map(HEADER_BYTES.__add__, map(len, payloads))
    return list(accumulate(sizes, initial=0))


def encode_records(
    payloads: Sequence[bytes], flags: Sequence[int] | None, ids: Sequence[int] = ()
) -> bytes:
    """Return records in segment format, back to back.

    No Python bytecode runs per message.

    Args:
        payloads: at least one.
        flags: one for each payload; None when all are 0.
        ids: one for each payload; () when all are 0.
    """
    checksums = map(and_, map(crc32, payloads), repeat(CHECKSUM_MASK))
    sizes = map(len, payloads)
    pieces = [b""] * (2 * len(payloads))
    if flags is None and not ids:
        pieces[::2] = map(_PLAIN_HEADER.pack, sizes, checksums)
    else:
        pieces[::2] = map(
            HEADER.pack, sizes, checksums, ids or repeat(0), flags or repeat(0)
        )
    pieces[1::2] = payloads
    return b"".join(pieces)


class SendFuture:
    """The outcome of one message, now or later. Thread-safe.

    `await` it, or call `result` from a thread other than the event loop's. Dropping it
    or cancelling an `await` does not stop the message.
    """

    __slots__ = ("_at", "_batch")

    def __init__(self, batch: Batch, at: int) -> None:
        self._batch = batch
        self._at = at

    def done(self) -> bool:
        """Return whether the outcome is known."""
        return self._batch.is_done

    def result(self, timeout: float | None = None) -> SendResult:
        """Wait for the outcome and return it.

        Args:
            timeout: seconds; None waits until the message's own deadline.

        Returns:
            Partition, offset and id of the message.

        Raises:
            MetaqError: the message failed; `OutcomeUnknownError` if it may be stored.
            RequestTimeoutError: no outcome yet; the message is still being sent.
            RuntimeError: no outcome yet, and called on the event loop's thread.
        """
        outcome = self._outcome(timeout)
        if isinstance(outcome, SendResult):
            return outcome
        raise outcome.with_traceback(None)

    def exception(self, timeout: float | None = None) -> MetaqError | None:
        """Wait for the outcome; return its error, or None if the message is stored.

        Returns:
            The error that `result` raises.

        Raises:
            As `result`, except the message's own error.
        """
        outcome = self._outcome(timeout)
        return None if isinstance(outcome, SendResult) else outcome

    def add_done_callback(self, function: Callable[["SendFuture"], object]) -> None:
        """Call `function(self)` on the event loop's thread when the outcome is known.

        It must not block. An exception goes to the loop's exception handler. If the
        client is closed and the outcome known, it is called on the caller's thread.

        Raises:
            ClosedError: called in a forked child.
        """
        self._batch.call_later(function, self)

    def pass_on(self, batch: Batch) -> None:
        """Give this outcome also to another batch, which has one message."""

        def resolve() -> None:
            batch.resolve([BatchOutcome(0, self._batch.outcome(self._at))])

        self._batch.add_callback(resolve)

    def __await__(self) -> Generator[Any, None, SendResult]:
        """Wait for the outcome; errors as `result`."""
        if not self._batch.is_done:
            yield from self._batch.wait_async().__await__()
        return self.result()

    def _outcome(self, timeout: float | None) -> SendResult | MetaqError:
        check_timeout(timeout)
        if not self._batch.wait(timeout):
            raise RequestTimeoutError(
                f"no outcome within {timeout:g} s; the message is still being sent"
            )
        return self._batch.outcome(self._at)


class SendResults(Sequence[SendResult]):
    """The results of many messages, in their order; each is computed on access."""

    def __init__(
        self, parts: Sequence[tuple[Batch, int, int]], order: Sequence[int] | None
    ) -> None:
        """Create the results of appended messages.

        Args:
            parts: (batch, index of the first message, number of messages), in order;
                the batches are done.
            order: for each message of the caller its index in the parts; None if that
                is the same.
        """
        self._parts = parts
        self._order = order
        self._starts = list(accumulate((count for _, _, count in parts), initial=0))

    def __len__(self) -> int:
        """Return the number of messages."""
        return self._starts[-1]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} messages)"

    @overload
    def __getitem__(self, at: int) -> SendResult: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[SendResult]: ...
    def __getitem__(self, at: int | slice) -> SendResult | Sequence[SendResult]:
        """Return one result, or a list of them."""
        if isinstance(at, slice):
            return [self._result(n) for n in range(*at.indices(len(self)))]
        return self._result(range(len(self))[at])

    def __iter__(self) -> Iterator[SendResult]:
        """Iterate over the results in the order of the messages."""
        return map(self._result, range(len(self)))

    def outcomes(self) -> list[SendResult | MetaqError]:
        """Return the result or error of each message."""
        return list(map(self._outcome, range(len(self))))

    def raise_errors(self) -> None:
        """Raise if any message failed.

        Raises:
            MetaqError: the first error, if no message is stored.
            PartlySentError: some messages are stored.
        """
        if all(
            isinstance(outcome.result, SendResult)
            for batch, _, _ in self._parts
            for outcome in batch.outcomes
        ):
            return
        outcomes = self.outcomes()
        errors = [o for o in outcomes if not isinstance(o, SendResult)]
        if not errors:
            return  # only messages of other callers in these batches failed
        if len(errors) == len(outcomes):
            raise errors[0].with_traceback(None)
        raise PartlySentError(
            f"{len(errors)} of {len(outcomes)} messages failed, the first: {errors[0]}",
            outcomes,
        ) from errors[0]

    def _result(self, at: int) -> SendResult:
        outcome = self._outcome(at)
        if isinstance(outcome, SendResult):
            return outcome
        raise outcome.with_traceback(None)

    def _outcome(self, at: int) -> SendResult | MetaqError:
        number = at if self._order is None else self._order[at]
        part = bisect_right(self._starts, number) - 1
        batch, first, _ = self._parts[part]
        return batch.outcome(first + number - self._starts[part])


def _settle_elsewhere(
    loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[None]
) -> None:
    # A closed loop has no waiters.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(finish, waiter, None)
