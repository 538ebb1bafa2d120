"""A write with `delivery=exactly-once`: the steps of Spark for a batch.

    created for a plan     begin               the terms are pickled for the tasks
    write, in each task    send and prepare,   returns a message with the branch
                           check the turn
    commit                 decide, complete
    abort                  give up

Spark creates one sink for the plan of a micro-batch and another for its commit; a batch
write is planned and committed by the same one.

A task sends its rows in an XA transaction, prepares it, and reports the branch to the
driver. A repeated run of a task shares no state with the first one, so rows may have
another order and go to other partitions. A task that fails rolls back at the brokers it
can reach; a broker drops unprepared branches itself, and the driver rolls back prepared
ones. A task that prepares after its run has ended finds another turn, and rolls back.

A branch begins at a broker with the first messages for it. One call of
`BranchSender.send` is in progress at a time, while the caller makes the next batch. The
first failure ends the task: it is then unknown which messages are in the transaction,
so all of it is rolled back. An unprepared branch that cannot be rolled back ends with
its lifetime at the broker.

Source: docs/metaq-1.4/client.md 9.3.
"""

import logging
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from metaq.client.errors import UnknownXidError
from metaq.client.fan_out import failures, for_each, raise_first
from metaq.client.produce.broker_starts import BrokerStarts
from metaq.client.produce.transaction_branch import Branch, BranchParts
from metaq.errors import MetaqError, ServerError
from metaq.model import BrokerId, Millis, TopicPartition, XaTransactionId
from metaq.spark.clusters import shared_cluster
from metaq.spark.errors import SparkError, TakenOverError
from metaq.spark.options import SinkOptions
from metaq.spark.sink.decisions import (
    Decision,
    QueryRecord,
    RowSum,
    TaskBranch,
    WriteTerms,
    branch_xid,
)
from metaq.spark.sink.outbox import (
    OwnSender,
    RowOutbox,
    RowTargets,
    Targets,
    WriteName,
    Written,
    draw_turn,
    write_name,
)
from metaq.spark.sink.sink_rows import Payloads, fill_tombstones, sum_batch, sum_rows

if TYPE_CHECKING:
    from metaq.spark.sink.exactly_once import TransactionManager

LIFETIME_S: Final = 24 * 3600
"""Maximum seconds until a branch is prepared; a broker limits them further to its
`maxTxTimeoutInSeconds`."""

_log = logging.getLogger(__name__)

T = TypeVar("T")


class BranchSender(OwnSender):
    """Sends messages in one XA transaction. Blocking; owned by one thread.

    Lifecycle: a context manager with a thread of its own; `send` any number of times,
    then `prepare` or `roll_back`. Leaving it sends nothing.
    """

    def __init__(
        self,
        addresses: Mapping[BrokerId, str],
        xid: XaTransactionId,
        *,
        timeout_s: float,
    ) -> None:
        """Prepare to send; nothing is connected yet.

        Args:
            addresses: of brokers, `meta://host:port` or `host:port`; read with the
                first messages for each, so more may be added until then.
            xid: never used by another sender.
            timeout_s: time limit of each call, and of connecting.

        Raises:
            NoResourcesError: no thread can be started.
        """
        self._xid = xid
        self._branches: dict[BrokerId, Branch] = {}
        self._sending: Future[None] | None = None
        self.message_count = 0
        self.size_bytes = 0
        self.promised_ms = Millis(0)
        """Wall clock time of `prepare`, ms since 1970; 0 before."""
        super().__init__("metaq-branches", addresses, timeout_s)

    def send(
        self, partition: TopicPartition, payloads: Sequence[bytes], flags: Sequence[int]
    ) -> None:
        """Add messages, in order; waits for those of the last call, not for these.

        Errors are those of the last call.

        Args:
            partition: destination.
            payloads: each an attribute block, if its flag says so, and application
                bytes.
            flags: one for each payload.

        Raises:
            UnknownXidError: the broker has rolled the branch back: its time is over.
            NoBrokerError: the partition's broker cannot be reached.
            MessageTooLargeError: a payload exceeds the broker's limit.
            MetaqError: a broker refuses, or does not answer.
        """
        self._wait()
        self.message_count += len(payloads)
        self.size_bytes += sum(map(len, payloads))
        self._sending = self._thread.begin(self._put(partition, payloads, flags))

    def prepare(self) -> tuple[BrokerId, ...]:
        """Prepare the branch at every broker, which keeps it until commit or rollback.

        *Durability.* Each branch is durable as the broker's settings for transactions
        demand.

        Returns:
            The brokers that have something to commit, sorted; () if nothing was sent.

        Raises:
            As `send`; call `roll_back` then.
        """
        self._wait()
        self.promised_ms = self._clock.wall_ms()
        votes = self._thread.run(self._at_each(self._parts.vote))
        raise_first(votes)
        return tuple(sorted(one for one, has_work in votes.items() if has_work))

    def roll_back(self) -> None:
        """Roll back the branch at every broker; log brokers that are not reached."""
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None
        # Over any connections, because those of `begin` may be lost.
        results = self._thread.run(self._at_each(self._parts.roll_back))
        for broker_id, error in failures(results).items():
            _log.info(
                "rollback did not reach a broker: broker=%d error=%s", broker_id, error
            )

    # -- inside -----------------------------------------------------------------------

    def _wait(self) -> None:
        """Wait for the last `send`; raises its error, each time."""
        if self._sending is not None:
            self._sending.result()

    async def _start(self) -> None:
        await super()._start()
        self._parts = BranchParts(
            address_of=self._address_of,
            pool=self._pool,
            clock=self._clock,
            session_id=f"{self._xid.qualifier}-{self._xid.branch.hex()}",
            starts=BrokerStarts(self._clock),
        )

    async def _put(
        self, partition: TopicPartition, payloads: Sequence[bytes], flags: Sequence[int]
    ) -> None:
        deadline_s = self._deadline_s()
        branch = self._branches.get(partition.broker_id)
        if branch is None:
            branch = await self._begin(partition.broker_id, deadline_s)
        branch.check(payloads)
        await branch.put_run(partition, payloads, flags, deadline_s=deadline_s)

    async def _begin(self, broker_id: BrokerId, deadline_s: float) -> Branch:
        connection = await self._parts.connect(broker_id, deadline_s=deadline_s)
        branch = Branch(self._parts, connection, broker_id, self._xid)
        self._branches[broker_id] = branch
        await branch.begin(
            LIFETIME_S, deadline_s=deadline_s, qualifier=self._xid.qualifier
        )
        return branch

    def _at_each(
        self, work: Callable[..., Awaitable[T]]
    ) -> Coroutine[Any, Any, dict[BrokerId, T | MetaqError]]:
        act = partial(work, xid=self._xid, deadline_s=self._deadline_s())
        return for_each(act, self._branches)


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


TaskMessages: TypeAlias = Sequence[WriterCommitMessage | None]
"""Message of each task to the driver; None for a failed task."""


@dataclass
class TaskPrepared(WriterCommitMessage):
    """Message of one task to the driver; its size does not depend on the rows."""

    written: Written
    """Counters of the task's messages, which become readable with the commit."""
    query: str
    terms: WriteTerms
    branch: TaskBranch
    """Its branch; without brokers if there were no rows."""
    promised_ms: Millis
    """Wall clock time of its machine at `prepare`, ms since 1970."""
    rows: RowSum
    is_repeat: bool = False
    """Whether the batch was decided before, so that nothing was written."""


class ExactSink:
    """The exactly-once sink of one write; picklable, for executors."""

    def __init__(
        self,
        options: SinkOptions,
        *,
        name: str,
        place: str,
        write: str | None,
        is_planned: bool,
    ) -> None:
        """Prepare a batch.

        Args:
            options: options with `zookeeper`.
            name: name of the query's nodes, and its qualifier at brokers.
            place: name of the query in errors and for operators.
            write: id of a batch write; None for a stream, whose tasks know it.
            is_planned: True to plan tasks, False to commit a batch.

        Raises:
            NoTransactionsError: a broker refuses transactions.
            NoBrokerError: no broker takes puts to the topic.
            CoordinationError: ZooKeeper is not available.
        """
        self._options = options
        self._name = name
        self._place = place
        self._write = write
        self._targets: Targets = {}
        self._terms: WriteTerms | None = None
        if is_planned:
            if options.topic is not None:
                self._targets = self._find([options.topic])
            brokers = {p.broker_id for some in self._targets.values() for p in some}
            self._terms = self._run(lambda manager: manager.begin(brokers))

    def write_rows(self, batches: Iterator[pa.RecordBatch]) -> TaskPrepared:
        """Send the rows of one task, and prepare them at the brokers.

        Raises:
            RowError: a row cannot be written.
            SparkError: a later batch of the query is decided; or a broker refused the
                rows, or rolled them back because their time was over.
            TakenOverError: the run of the task has ended.
            CoordinationError: ZooKeeper is not available to check that.
            MetaqError: a broker cannot be reached or refuses.
        """
        terms, name = self._terms, write_name("")
        if terms is None:
            raise SparkError("a task came from a writer that was made for a commit")
        name = replace(name, query=name.query.strip())
        if self._write is not None:
            name = replace(name, query=self._write, batch=0)
        query, batch, topic = name.query, name.batch, self._options.topic
        if self._options.has_tombstones:
            batches = map(fill_tombstones, batches)
        if terms.covers(query, batch):
            if batch < terms.batch:
                raise self._set_back(query, batch, f"batch {terms.batch} is decided")
            rows = sum((sum_batch(each, topic) for each in batches), RowSum())
            nothing = TaskBranch(name.task, name.attempt, ())
            return TaskPrepared(
                Written(0, 0, 0), query, terms, nothing, Millis(0), rows, is_repeat=True
            )
        with BranchOutbox(
            name,
            RowTargets(topic, self._targets, self._find),
            qualifier=self._name,
            timeout_s=self._options.wire.request_timeout_s,
        ) as outbox:
            for each in batches:
                outbox.put(each)
            written, branch = outbox.prepare()
            if branch.brokers:
                self._require_turn(terms)
            return TaskPrepared(
                written, query, terms, branch, outbox.sender.promised_ms, outbox.rows
            )

    def commit(self, batch: int, messages: TaskMessages) -> None:
        """Decide about a batch whose tasks are prepared, and commit it.

        Raises:
            TakenOverError: another driver has taken over; nothing of it is written.
            SparkError: the number was decided for other rows; these are not written.
            IncompleteError: it is decided, but not completely committed.
            DecisionError: it has too many tasks for a decision.
            CoordinationError: ZooKeeper is not available; it may be decided.
        """
        tasks = [m for m in messages if isinstance(m, TaskPrepared)]
        rows = sum((one.rows for one in tasks), RowSum())
        if any(one.is_repeat for one in tasks):
            kept, query = self._run(lambda m: m.complete()), tasks[0].query
            if kept is None or (kept.query, kept.batch) != (query, batch):
                raise self._set_back(query, batch, "another one is decided by now")
            if kept.rows not in (None, rows):
                found = f"it was decided for {kept.rows}, and has {rows} now"
                raise self._set_back(query, batch, found)
        branches = sorted(one.branch for one in tasks if one.branch.brokers)
        if branches:
            first_ms = min(one.promised_ms for one in tasks if one.branch.brokers)
            decision = Decision(tasks[0].query, batch, tuple(branches), rows)
            terms = tasks[0].terms
            turn = self._run(lambda manager: manager.decide(decision, terms))
            self._run(lambda manager: manager.complete(decision, turn, first_ms))
        if self._write is not None:
            self._run(lambda manager: manager.forget())

    def abort(self, batch: int, messages: TaskMessages) -> None:
        """Roll back a batch, unless it is decided; running tasks roll back themselves.

        Raises:
            CoordinationError: ZooKeeper is not available; the next run rolls back.
        """
        tasks = [m for m in messages if isinstance(m, TaskPrepared)]
        branches = [
            (broker_id, branch_xid(self._name, one.query, batch, one.branch))
            for one in tasks
            for broker_id in one.branch.brokers
        ]
        terms = tasks[0].terms if tasks else self._terms
        turn = None if terms is None else terms.turn
        decision = self._run(lambda manager: manager.give_up(branches, turn))
        if self._write is not None and decision is None:
            self._run(lambda manager: manager.forget())

    def _require_turn(self, terms: WriteTerms) -> None:
        """Raise if the turn has changed: no driver will decide about this task."""
        kept = shared_cluster(self._options.wire).read_decision(self._name)
        if QueryRecord.decode(kept).turn != terms.turn:
            raise TakenOverError(
                f"{self._name}: the rows of a task are rolled back: its write has ended"
                " or was given up, or another driver has taken it over"
            )

    def _set_back(self, query: str, batch: int, found: str) -> SparkError:
        return SparkError(
            f"batch {batch} of query {query} is not written: {found}. The checkpoint"
            f" {self._place} was set back (restored, or an older copy), or the query"
            ' makes other rows each time it is run; docs/spark.md says under "Exactly'
            ' once" how to go on'
        )

    def _find(self, topics: Collection[str]) -> Targets:
        return shared_cluster(self._options.wire).targets(topics)

    def _run(self, step: "Callable[[TransactionManager], Coroutine[Any, Any, T]]") -> T:
        """Run a step of the manager, on the driver; tasks never import the manager."""
        from metaq.spark.sink.exactly_once import TransactionManager  # noqa: PLC0415  # see above

        return shared_cluster(self._options.wire).run(
            lambda context, deadline_s: step(
                TransactionManager(
                    context,
                    deadline_s,
                    name=self._name,
                    place=self._place,
                    draw_turn=draw_turn,
                )
            )
        )


class BranchOutbox(RowOutbox):
    """Sends the rows of one task in a transaction. Blocking; one thread.

    Lifecycle: a context manager; `put` any number of times, `prepare` once. Leaving by
    an exception rolls back.
    """

    def __init__(
        self, name: WriteName, targets: RowTargets, *, qualifier: str, timeout_s: float
    ) -> None:
        """Prepare to send.

        Args:
            name: of the task; its batch is 0 for a batch write.
            targets: destinations of the rows.
            qualifier: of the write's transactions.
            timeout_s: as for `BranchSender`.
        """
        super().__init__(targets, name.turn)
        self._name = name
        branch = TaskBranch(name.task, name.attempt, ())
        xid = branch_xid(qualifier, name.query, name.batch, branch)
        self.sender = BranchSender(self._addresses, xid, timeout_s=timeout_s)
        self.rows = RowSum()

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        try:
            if kind is not None:
                self.sender.roll_back()
        finally:
            self.sender.close()

    def prepare(self) -> tuple[Written, TaskBranch]:
        """Prepare the rows at the brokers; return counters, and the branch to commit.

        Raises as `put`.
        """
        try:
            brokers = self.sender.prepare()
        except MetaqError as error:
            raise _explained(error) from error
        done = Written(self.sender.message_count, self.sender.size_bytes, 0)
        return done, TaskBranch(self._name.task, self._name.attempt, brokers)

    def _send(self, partition: TopicPartition, new: Payloads) -> None:
        self.rows += sum_rows(partition.topic, new)
        try:
            self.sender.send(partition, new.payloads, new.flags)
        except MetaqError as error:
            raise _explained(error) from error


def _explained(error: MetaqError) -> MetaqError:
    """Return an error that names the setting to change, if there is one."""
    if isinstance(error, UnknownXidError):
        return SparkError(f"{error}: {_TIME_IS_OVER}")
    if type(error) is ServerError:
        return SparkError(f"{error}: {_IS_REFUSED}")
    return error
