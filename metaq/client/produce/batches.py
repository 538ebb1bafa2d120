"""Batches of messages for one partition, and the futures of their senders.

Theory of operation. A million messages a second leave no time for an object that does
something per message. So a message is one element of its batch's list of payloads, and
a `SendFuture` is a name for it: the batch, and where in the batch. When a broker has
answered, the batch gets its outcomes, one for each request: one `mput`, or a run of
puts. Of an `mput` the id and offset of each message are computed from those of the
first one (`record.ids.id_after`, and the lengths before it); of puts they are two
columns.

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
    """The partition it went to."""
    offset: Offset
    """Offset of its record's first byte."""


class BatchOutcome(NamedTuple):
    """Outcome of messages of a batch, from `first` up to the next outcome's."""

    first: int
    result: SendResult | MetaqError
    """Of the first message; an error is that of all."""
    ids: Sequence[int] | None = None
    """Ids of all of them, where they were put one by one, or have a time."""
    offsets: Sequence[int] | None = None
    """Their offsets, likewise."""


class BatchName(NamedTuple):
    """Producer and sequence that a caller gave a batch: the same in every run."""

    producer: str
    """1..64 of [A-Za-z0-9._~-]."""
    sequence: int
    """Of the batch's first message, 0 or more."""
    spare: str | None
    """Producer for when these numbers were used for other messages; or None."""


@dataclass(slots=True)
class Home:
    """The loop where batches are resolved, and the lock that guards them all."""

    lock: threading.Lock
    """Guards the callbacks of every batch; held for moments only."""
    loop: asyncio.AbstractEventLoop
    thread_id: int
    pid: int = field(default_factory=os.getpid)

    def is_here(self) -> bool:
        """Return whether the caller runs on the loop's thread."""
        return threading.get_ident() == self.thread_id

    def require_own(self) -> None:
        """Raise in the child of a fork, where nothing is ever resolved.

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
        """Do the same, and raise OutcomeUnknownError where the loop was closed."""
        self.require_own()
        if self.loop.is_closed():
            raise OutcomeUnknownError(
                "the event loop was closed before the client; outcome unknown"
            )


class Batch:
    """Messages for one partition that travel together.

    Owner: the accumulator while it grows, one sender after another later.
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
        """All of its messages may go to another partition."""
        self.name: BatchName | None = None
        """Given by the caller; None leaves producer and sequence to the delivery."""
        self.times: list[Millis] = []
        """Time of each message before which nothing reads it; []: they have none."""
        self.payloads: list[bytes] = []
        self.flags: dict[int, int] = {}
        """Flags that are not 0, by the message's number in the batch."""
        self.reserved_bytes = 0
        """Record bytes of the buffer that are this batch's."""
        self.reserved_count = 0
        """Messages, likewise."""
        self.bytes_left = 0
        """Reserved bytes that no message has taken yet."""
        self.requests_left = 1
        """Requests without an outcome; it travels whole as long as it can."""
        self.found: list[BatchOutcome] = []
        """Outcomes of the others, in any order."""

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
        """Return the outcomes, in order of their `first`; () before they are known."""
        return self._outcomes or ()

    def resolve(self, outcomes: Sequence[BatchOutcome]) -> None:
        """Set the outcomes and call all callbacks. On the loop's thread.

        Args:
            outcomes: at least one, ascending, the first one's `first` is 0.
        """
        with self._home.lock:
            self._outcomes = outcomes
            callbacks, self._callbacks = self._callbacks, {}
        for callback in callbacks:
            callback()

    def add_callback(self, callback: Callable[[], object]) -> None:
        """Call back on the loop's thread when it is done; at once when it is.

        Args:
            callback: must not raise and not wait; equal to no other one.
        """
        with self._home.lock:
            if self._outcomes is None:
                self._callbacks[callback] = None
                return
        callback()

    def remove_callback(self, callback: Callable[[], object]) -> None:
        """Forget a callback; harmless when it was called."""
        if self._outcomes is None:
            with self._home.lock:
                self._callbacks.pop(callback, None)

    def call_later(self, function: Callable[..., object], argument: object) -> None:
        """Let the loop call a function of a user, which may raise, when it is done.

        Raises:
            ClosedError: called in the child of a fork.
        """
        self._home.require_own()

        def call() -> None:
            with contextlib.suppress(RuntimeError):
                self._home.loop.call_soon_threadsafe(function, argument)
                return
            # The client is closed, and its loop with it.
            function(argument)

        self.add_callback(call)

    def wait(self, timeout_s: float | None) -> bool:
        """Block until it is done; return False when the time is over before.

        Raises:
            RuntimeError: called on the loop's thread, which would wait for itself.
            ClosedError, OutcomeUnknownError: as `Home.require_loop`.
        """
        if self._outcomes is not None:
            return True
        self._home.require_loop()
        if self._home.is_here():
            raise RuntimeError("the event loop cannot wait for itself; use await")
        # A third of the cost of an event, half of which delays an answer.
        done = threading.Lock()
        done.acquire()
        self.add_callback(done.release)
        try:
            return done.acquire(timeout=-1 if timeout_s is None else max(0, timeout_s))
        finally:
            self.remove_callback(done.release)

    async def wait_async(self) -> None:
        """Wait until it is done, on any event loop.

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
        """Return the outcome of the message at `at`; only when it is done."""
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
            # Of a message with a time, that is its own.
            return type(result)(*found_at, *self.times[at : at + 1], *result[4:])
        return SendResult(
            id_after(result.message_id, at - first),
            result.partition,
            Offset(result.offset + self.size_of(first, at)),
        )

    @property
    def ends(self) -> Sequence[int]:
        """Return the record bytes before each message and in all, from anywhere on.

        Of a sealed batch.
        """
        ends = self._ends
        if len(ends) <= len(self.payloads):
            # Two threads may do this at once: both come to the same.
            ends = self._ends = ends_of(self.payloads)
        return ends

    def add(
        self,
        payloads: Sequence[bytes],
        flags: Sequence[int] | None,
        ends: Sequence[int],
    ) -> None:
        """Add messages that fit; no flags: all are 0; `ends`: see `ends_of`."""
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
        """Return the times of some messages; (): they have none, or one in common."""
        times = self.times[first:end]
        return times if len(set(times)) > 1 else ()


def ends_of(payloads: Sequence[bytes]) -> Sequence[int]:
    """Return the record bytes up to each payload and up to the end, from 0 on.

    Args:
        payloads: at least one.
    """
    sizes = map(HEADER_BYTES.__add__, map(len, payloads))
    return list(accumulate(sizes, initial=0))


def encode_records(
    payloads: Sequence[bytes], flags: Sequence[int] | None, ids: Sequence[int] = ()
) -> bytes:
    """Return records in segment format, back to back.

    No interpreted instruction runs per message.

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
    """The outcome of one message, now or later. Safe in threads.

    `await` it, or ask `result` from a thread that is not the event loop's. Dropping it
    does not stop the message; cancelling an `await` does not either.
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
            timeout: seconds; None waits as long as the message's own deadline lets it.

        Returns:
            Where the message is stored.

        Raises:
            MetaqError: the message failed; `OutcomeUnknownError` when it may be stored.
            RequestTimeoutError: it is not known yet; the message goes on.
            RuntimeError: it is not known yet, and this is the event loop's thread.
        """
        outcome = self._outcome(timeout)
        if isinstance(outcome, SendResult):
            return outcome
        raise outcome.with_traceback(None)

    def exception(self, timeout: float | None = None) -> MetaqError | None:
        """Wait for the outcome; return its error, None when the message is stored.

        Returns:
            The error that `result` raises.

        Raises:
            As `result`, but for the message's own error.
        """
        outcome = self._outcome(timeout)
        return None if isinstance(outcome, SendResult) else outcome

    def add_done_callback(self, function: Callable[["SendFuture"], object]) -> None:
        """Call `function(self)` on the event loop's thread when the outcome is known.

        It must not block. An exception goes to the loop's exception handler. When the
        client is closed already, it is called here.

        Raises:
            ClosedError: called in the child of a fork.
        """
        self._batch.call_later(function, self)

    def pass_on(self, batch: Batch) -> None:
        """Have the only message of another batch end as this one does."""

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
    """The results of many messages, in their order; each is computed when asked for."""

    def __init__(
        self, parts: Sequence[tuple[Batch, int, int]], order: Sequence[int] | None
    ) -> None:
        """Join appended messages.

        Args:
            parts: (batch, its first message that counts, how many), in order; batches
                that are done.
            order: for each message of the caller its number in the parts; None when
                that is the same.
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
        """Go through the results in the order of the messages."""
        return map(self._result, range(len(self)))

    def outcomes(self) -> list[SendResult | MetaqError]:
        """Return result or error of each message."""
        return list(map(self._outcome, range(len(self))))

    def raise_errors(self) -> None:
        """Return when every message is stored.

        Raises:
            MetaqError: the error of one part, when nothing is stored.
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
            return  # the batches had other messages as well, and those failed
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
    # Waiters on that loop are gone when it is closed.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(finish, waiter, None)
