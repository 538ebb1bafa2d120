"""The sync world's transactions: the same names, arguments and errors."""

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

from metaq.client.partitioner import OutgoingMessage
from metaq.client.produce.transaction import AsyncTransaction, TransactionState
from metaq.client.produce.transaction_branch import PendingResult
from metaq.client.produce.xa import AsyncXa
from metaq.loop_thread import LoopThread
from metaq.model import XaTransactionId
from metaq.record.checksum import BytesLike


class Transaction:
    """A local transaction for any number of threads; see `AsyncTransaction`."""

    def __init__(self, twin: AsyncTransaction, thread: LoopThread) -> None:
        """Wrap the async twin; `Producer.transaction` is the way in."""
        self._twin = twin
        self._thread = thread

    @property
    def id(self) -> str:
        """Its id, as brokers log it."""
        return self._twin.id

    @property
    def state(self) -> TransactionState:
        """Its state."""
        return self._twin.state

    def send(
        self,
        topic: str,
        data: BytesLike,
        *,
        attribute: str | None = None,
        key: str | bytes | None = None,
        partition: str | None = None,
        timeout: float | None = None,
    ) -> PendingResult:
        """Add one message; see `AsyncTransaction.send`."""
        return self._thread.run(
            self._twin.send(
                topic,
                data,
                attribute=attribute,
                key=key,
                partition=partition,
                timeout=timeout,
            )
        )

    def send_many(
        self,
        topic: str,
        messages: Iterable[BytesLike | OutgoingMessage],
        *,
        timeout: float | None = None,
    ) -> Sequence[PendingResult]:
        """Add a list; see `AsyncTransaction.send_many`."""
        return self._thread.run(self._twin.send_many(topic, messages, timeout=timeout))

    def commit(self, timeout: float | None = None) -> None:
        """Store all messages; see `AsyncTransaction.commit`."""
        self._thread.run(self._twin.commit(timeout))

    def rollback(self, timeout: float | None = None) -> None:
        """Give all messages up; see `AsyncTransaction.rollback`."""
        self._thread.run(self._twin.rollback(timeout))

    def __repr__(self) -> str:
        return self._thread.describe(self._twin)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._thread.run(self._twin.__aexit__(kind, error, trace))


class Xa:
    """XA transactions, one at a time, for any thread; see `AsyncXa`."""

    def __init__(self, twin: AsyncXa, thread: LoopThread) -> None:
        """Wrap the async twin; `Client.xa` is the way in."""
        self._twin = twin
        self._thread = thread

    @property
    def qualifier(self) -> str:
        """The name that tells its transactions from those of other programs."""
        return self._twin.qualifier

    def xid(
        self, format_id: int, global_id: str | bytes, branch: str | bytes = b""
    ) -> XaTransactionId:
        """Return the id of a transaction; see `AsyncXa.xid`."""
        return self._twin.xid(format_id, global_id, branch)

    def begin(self, xid: XaTransactionId, timeout: float | None = None) -> None:
        """Begin a transaction; see `AsyncXa.begin`."""
        self._thread.run(self._twin.begin(xid, timeout))

    def send(
        self,
        topic: str,
        data: BytesLike,
        *,
        attribute: str | None = None,
        key: str | bytes | None = None,
        partition: str | None = None,
        timeout: float | None = None,
    ) -> PendingResult:
        """Add one message; see `AsyncXa.send`."""
        return self._thread.run(
            self._twin.send(
                topic,
                data,
                attribute=attribute,
                key=key,
                partition=partition,
                timeout=timeout,
            )
        )

    def send_many(
        self,
        topic: str,
        messages: Iterable[BytesLike | OutgoingMessage],
        *,
        timeout: float | None = None,
    ) -> Sequence[PendingResult]:
        """Add a list; see `AsyncXa.send_many`."""
        return self._thread.run(self._twin.send_many(topic, messages, timeout=timeout))

    def prepare(self, timeout: float | None = None) -> bool:
        """Have every broker promise to keep its part; see `AsyncXa.prepare`."""
        return self._thread.run(self._twin.prepare(timeout))

    def commit(
        self, xid: XaTransactionId | None = None, timeout: float | None = None
    ) -> None:
        """Commit a transaction; see `AsyncXa.commit`."""
        self._thread.run(self._twin.commit(xid, timeout))

    def rollback(
        self, xid: XaTransactionId | None = None, timeout: float | None = None
    ) -> None:
        """Give a transaction up; see `AsyncXa.rollback`."""
        self._thread.run(self._twin.rollback(xid, timeout))

    def recover(
        self, *, partial: bool = False, timeout: float | None = None
    ) -> list[XaTransactionId]:
        """Return what is prepared; see `AsyncXa.recover`."""
        return self._thread.run(self._twin.recover(partial=partial, timeout=timeout))

    def forget(self, xid: XaTransactionId, timeout: float | None = None) -> None:
        """Take note of a heuristic outcome; see `AsyncXa.forget`."""
        self._thread.run(self._twin.forget(xid, timeout))

    @property
    def is_closed(self) -> bool:
        """Whether it takes no more messages."""
        self._thread.require_own()
        return self._twin.is_closed

    def close(self, timeout: float | None = None) -> None:
        """Roll back what is not prepared; see `AsyncXa.close`."""
        self._thread.run_close(self._twin.close(timeout))

    def __repr__(self) -> str:
        return self._thread.describe(self._twin)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
