"""The raw bytes of a range of one partition's log: blocking, with gets pipelined.

Theory of operation: the log is taken in pieces that follow one another byte by byte,
wherever its records begin, so the next get is on its way before anybody has looked at
the bytes of the last one. A reply that is shorter than asked (a segment ends there)
makes what was asked behind it useless; it is dropped, and until a whole reply comes
nothing is asked ahead.

A connection that breaks, or an answer that does not come, is followed by another try
at the same offset, until `retry_timeout_s` without a byte of progress.

Not thread-safe; one thread owns a reader. Source: client spec 2.4.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Final, Self, TypeVar

from metaq.client.errors import NoDataError
from metaq.client.replies import Fetched, GetOutcome, parse_get
from metaq.client.wire import BROWSER_GROUP, WireConnection, pump
from metaq.clock import Clock, SystemClock
from metaq.errors import MetaqError, OffsetOutOfRangeError, RequestTimeoutError
from metaq.model import MAX_OFFSET, Offset, TopicPartition
from metaq.protocol.commands import Get, Reply
from metaq.retry import Backoff
from metaq.zk.znodes import BrokerAddress

GET_BYTES: Final = 1024 * 1024
"""What one get asks for: the largest slice that brokers give by default."""
AHEAD_MAX: Final = 2
"""Gets in flight while replies are whole."""
BACKOFF: Final = Backoff(first_s=0.1, max_s=2.0)

T = TypeVar("T")


@dataclass(slots=True)
class _Asked:
    """A get in flight."""

    offset: Offset
    size_bytes: int
    deadline_s: float
    replies: deque[Reply] = field(default_factory=deque)


class LogReader:
    """Reads one partition from one broker. Lifecycle: a context manager."""

    def __init__(
        self,
        partition: TopicPartition,
        address: BrokerAddress,
        *,
        timeout_s: float,
        retry_timeout_s: float,
        clock: Clock | None = None,
    ) -> None:
        """Prepare to read; the connection is made when it is needed.

        Args:
            partition: what is read.
            address: of a broker that has it.
            timeout_s: how long one answer may take.
            retry_timeout_s: how long to try again without progress.
            clock: for deadlines; None is the machine's.
        """
        self._partition = partition
        self._address = address
        self._timeout_s = timeout_s
        self._retry_timeout_s = retry_timeout_s
        self._clock = clock or SystemClock()
        self._connection: WireConnection | None = None
        self._asked: deque[_Asked] = deque()
        self._ahead = AHEAD_MAX

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; harmless twice."""
        self._asked.clear()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def span(self) -> tuple[Offset, Offset] | None:
        """Return (log start, log end) now; None where the broker has no such log.

        Raises:
            NoBrokerError, RequestTimeoutError: as `pieces`.
            WireError: the broker refused.
        """
        return self._retry(self._ask_span)

    def pieces(self, start: Offset, end: Offset) -> Iterator[bytes]:
        """Yield the log from `start` to `end`, each piece right behind the last one.

        Args:
            start: the first byte; need not be a record boundary.
            end: the byte behind the last one; the log must reach that far.

        Raises:
            OffsetOutOfRangeError: the log does not hold what comes next: retention has
                taken it, or the log ends before.
            NoDataError: the log should hold it, and the broker gives nothing.
            NoBrokerError: the broker cannot be reached.
            RequestTimeoutError: answers do not come.
            WireError: the broker refused.
        """
        position = start
        while position < end:
            data = self._retry(partial(self._take, position, end))
            position = Offset(position + len(data))
            yield data

    # -- inside -----------------------------------------------------------------------

    def _retry(self, attempt: Callable[[], T]) -> T:
        give_up_s = self._clock.monotonic_s() + self._retry_timeout_s
        failures = 0
        while True:
            try:
                return attempt()
            except MetaqError as error:
                self.close()
                failures += 1
                wake_s = self._clock.monotonic_s() + BACKOFF.delay_s(failures)
                if not error.retriable or wake_s >= give_up_s:
                    raise
            # Nothing to move: it only waits.
            pump([], deadline_s=wake_s, clock=self._clock)

    def _connected(self) -> WireConnection:
        if self._connection is None:
            self._connection = WireConnection.open(
                self._address, timeout_s=self._timeout_s, clock=self._clock
            )
        return self._connection

    def _ask_span(self) -> tuple[Offset, Offset] | None:
        connection = self._connected()
        topic, number = self._partition.topic, self._partition.partition
        start, end = (
            connection.offset(topic, number, offset, timeout_s=self._timeout_s)
            for offset in (0, MAX_OFFSET)
        )
        return None if start is None or end is None else (start, end)

    def _take(self, position: Offset, end: Offset) -> bytes:
        """Return the next bytes, and leave the gets behind them in flight."""
        if self._asked and self._asked[0].offset != position:
            self._asked.clear()
        self._ask_ahead(position, end)
        asked = self._asked[0]
        outcome = self._wait(asked)
        if not isinstance(outcome, Fetched):
            raise self._explain(position, end)
        self._asked.popleft()
        data = outcome.data
        if len(data) < asked.size_bytes:
            self._asked.clear()
            self._ahead = 1
        else:
            self._ahead = AHEAD_MAX
        self._ask_ahead(Offset(position + len(data)), end)
        return data

    def _ask_ahead(self, position: Offset, end: Offset) -> None:
        if self._asked:
            last = self._asked[-1]
            position = Offset(last.offset + last.size_bytes)
        connection = self._connected()
        while len(self._asked) < self._ahead and position < end:
            opaque = connection.next_opaque()
            size_bytes = min(GET_BYTES, end - position)
            asked = _Asked(
                position, size_bytes, self._clock.monotonic_s() + self._timeout_s
            )
            command = Get(
                self._partition.topic,
                BROWSER_GROUP,
                self._partition.partition,
                position,
                size_bytes,
                opaque,
            )
            connection.submit(command, opaque, asked.replies.append)
            self._asked.append(asked)
            position = Offset(position + size_bytes)

    def _wait(self, asked: _Asked) -> GetOutcome:
        while not asked.replies:
            one = [self._connected()]
            if not pump(one, deadline_s=asked.deadline_s, clock=self._clock):
                raise RequestTimeoutError(
                    f"get of {self._partition} at {asked.offset} from {self._address}:"
                    f" no answer within {self._timeout_s:g} s"
                )
        return parse_get(asked.replies.popleft())

    def _explain(self, position: Offset, end: Offset) -> MetaqError:
        """Return the error for an offset at which there is no data."""
        self._asked.clear()
        start, log_end = self._ask_span() or (Offset(0), Offset(0))
        if start <= position and end <= log_end:
            return NoDataError(
                f"{self._partition}: no data at {position}, although the log of"
                f" {self._address} is [{start}, {log_end})"
            )
        return OffsetOutOfRangeError(position, log_start=start, high_watermark=log_end)
