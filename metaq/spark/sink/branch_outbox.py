"""Messages of one task in an XA transaction, which the driver ends.

The task prepares it and tells the driver which it was: no run of a task stores anything
that another run has to know about. So rows may come in any order, and go anywhere, when
the task is run again. A task that fails rolls back what it can reach; of the rest a
broker drops what is not prepared, and the driver what is.
"""

from types import TracebackType
from typing import Final, Self

from metaq.client.errors import UnknownXidError
from metaq.client.produce.branch_sender import BranchSender
from metaq.errors import MetaqError, ServerError
from metaq.model import BrokerId, TopicPartition
from metaq.spark.errors import BranchRefusedError
from metaq.spark.sink.decisions import TaskBranch, branch_xid
from metaq.spark.sink.outbox import (
    FindTargets,
    RowOutbox,
    Targets,
    WriteName,
    Written,
)
from metaq.spark.sink.sink_rows import Payloads

_TIME_IS_OVER: Final = (
    "a task has the time from its first row to its last one that a broker grants a"
    " transaction: raise maxTxTimeoutInSeconds in server.ini, or make tasks smaller"
    " (repartition, maxOffsetsPerTrigger)"
)
_IS_REFUSED: Final = (
    "a broker holds the rows of a batch until it is committed: where it refuses for"
    " their size or number, raise txBytesMax, txCountMax or txJournalBytesMax in"
    " server.ini, or make batches smaller (maxOffsetsPerTrigger)"
)


class BranchOutbox(RowOutbox):
    """Sends the rows of one task. Blocking; one thread.

    Lifecycle: a context manager; `put` any number of times, `prepare` once. Leaving by
    an exception rolls back.
    """

    def __init__(
        self,
        name: WriteName,
        *,
        qualifier: str,
        query: str,
        batch: int,
        topic: str | None,
        targets: Targets,
        find_targets: FindTargets,
        timeout_s: float,
    ) -> None:
        """Prepare to send.

        Args:
            name: task and run.
            qualifier: of the write at brokers.
            query: the query, or the write.
            batch: number of the micro-batch; 0 for a batch write.
            topic: of all rows; None: each row names its own.
            targets: of topics that are known already.
            find_targets: asked for other topics.
            timeout_s: how long one answer may take.
        """
        super().__init__(
            topic=topic,
            targets=targets,
            find_targets=find_targets,
            first_turn=name.turn,
        )
        self._name = name
        branch = TaskBranch(name.task, name.attempt, ())
        xid = branch_xid(qualifier, query, batch, branch)
        self._sender = BranchSender(self._addresses, xid, timeout_s=timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is not None:
                self._sender.roll_back()
        finally:
            self._sender.close()

    def prepare(self) -> tuple[Written, TaskBranch]:
        """Have brokers promise to keep the rows; return counters, and what to commit.

        Raises:
            MetaqError: as `put`.
        """
        try:
            brokers: tuple[BrokerId, ...] = self._sender.prepare()
        except MetaqError as error:
            raise _explained(error) from error
        done = Written(self._sender.message_count, self._sender.size_bytes, 0)
        return done, TaskBranch(self._name.task, self._name.attempt, brokers)

    def _send(self, partition: TopicPartition, new: Payloads) -> None:
        try:
            self._sender.send(partition, new.payloads, new.flags)
        except MetaqError as error:
            raise _explained(error) from error


def _explained(error: MetaqError) -> MetaqError:
    """Return an error that says which option of which side to change."""
    if isinstance(error, UnknownXidError):
        return BranchRefusedError(f"{error}: {_TIME_IS_OVER}")
    if type(error) is ServerError:
        return BranchRefusedError(f"{error}: {_IS_REFUSED}")
    return error
