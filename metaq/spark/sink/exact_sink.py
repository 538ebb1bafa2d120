"""A write with `delivery=exactly-once`, as Spark takes it through a batch.

    made for a plan        begin               what the tasks run under is pickled
    write, in each task    send and prepare    a message with the branch
    commit                 decide, complete
    abort                  give up

Spark makes one of these for the plan of a micro-batch and another one for its commit,
and keeps neither; a batch write is planned and committed by one and the same.
"""

from collections.abc import Collection, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from metaq.spark.clusters import shared_cluster
from metaq.spark.errors import SparkError
from metaq.spark.options import SinkOptions
from metaq.spark.sink.branch_outbox import BranchOutbox
from metaq.spark.sink.decisions import Decision, TaskBranch, WriteTerms, branch_xid
from metaq.spark.sink.outbox import Targets, Written
from metaq.spark.sink.task import draw_turn, write_name

if TYPE_CHECKING:
    from metaq.spark.sink.exactly_once import TransactionManager

T_co = TypeVar("T_co", covariant=True)


@dataclass
class TaskPrepared(WriterCommitMessage):
    """Message of one task to the driver: small, whatever it has written."""

    written: Written
    """Counters of the task's messages; readable when the driver has committed."""
    query: str
    """The query, or the write."""
    terms: WriteTerms
    """Terms that the task was planned under."""
    branch: TaskBranch
    """Its branch; without brokers where there were no rows."""
    is_repeat: bool = False
    """The batch was decided before; nothing was written."""


class ManagerStep(Protocol[T_co]):
    """A step of a transaction manager."""

    def __call__(self, manager: "TransactionManager") -> Coroutine[Any, Any, T_co]:
        """Return the coroutine to run on the client's loop."""
        ...


class ExactSink:
    """The sink of one write; goes to executors in pickled form."""

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
            options: options of the write, with ZooKeeper.
            name: of the query's nodes, and its qualifier at brokers.
            place: names the query to people.
            write: the id of a batch write; None for a stream, whose tasks know it.
            is_planned: tasks come; False where a batch is to be committed.

        Raises:
            NoTransactionsError: a broker refuses transactions.
            NoBrokerError: no broker takes puts to the topic.
            CoordinationError: ZooKeeper cannot be asked.
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
        """Send the rows of one task, and have brokers promise to keep them.

        Raises:
            RowError: a row cannot be written.
            BranchRefusedError: a broker does not hold them; the text says what to do.
            MetaqError: a broker cannot be reached or refuses.
        """
        terms, name = self._terms, write_name("")
        if terms is None:
            raise SparkError("a task came from a writer that was made for a commit")
        query, batch = self._write, 0
        if query is None:
            query, batch = name.query.strip(), name.batch
        if terms.covers(query, batch):
            for _ in batches:
                pass  # Spark's other end writes until it is read
            nothing = TaskBranch(name.task, name.attempt, ())
            return TaskPrepared(Written(0, 0, 0), query, terms, nothing, True)
        with BranchOutbox(
            name,
            qualifier=self._name,
            query=query,
            batch=batch,
            topic=self._options.topic,
            targets=self._targets,
            find_targets=self._find,
            timeout_s=self._options.wire.request_timeout_s,
        ) as outbox:
            for rows in batches:
                outbox.put(rows)
            written, branch = outbox.prepare()
        return TaskPrepared(written, query, terms, branch)

    def commit(
        self, batch: int, messages: Sequence[WriterCommitMessage | None]
    ) -> None:
        """Decide about a batch whose tasks are prepared, and commit it.

        Raises:
            TakenOverError: another driver was faster; nothing of it is written.
            IncompleteError: it is decided, and not all is committed.
            DecisionError: it has more tasks than a decision takes.
            CoordinationError: ZooKeeper cannot be asked; it may be decided.
        """
        told = [m for m in messages if isinstance(m, TaskPrepared)]
        if any(one.is_repeat for one in told):
            self._run(lambda manager: manager.complete())
        branches = sorted(one.branch for one in told if one.branch.brokers)
        if branches:
            decision = Decision(told[0].query, batch, tuple(branches))
            terms = told[0].terms
            turn = self._run(lambda manager: manager.decide(decision, terms))
            self._run(lambda manager: manager.complete(decision, turn))
            if self._write is not None:
                self._run(lambda manager: manager.forget())

    def abort(self, batch: int, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Roll back what tasks have prepared, unless the batch is decided.

        Raises:
            CoordinationError: ZooKeeper cannot be asked; the next run does it.
        """
        told = [m for m in messages if isinstance(m, TaskPrepared)]
        branches = [
            (broker_id, branch_xid(self._name, one.query, batch, one.branch))
            for one in told
            for broker_id in one.branch.brokers
        ]
        if not branches:
            return
        turn = told[0].terms.turn
        decision = self._run(lambda manager: manager.give_up(branches, turn))
        if self._write is not None and decision is None:
            self._run(lambda manager: manager.forget())

    def _find(self, topics: Collection[str]) -> Targets:
        return shared_cluster(self._options.wire).targets(topics)

    def _run(self, step: ManagerStep[T_co]) -> T_co:
        """Run a step on the driver; tasks take none, and import no manager."""
        from metaq.spark.sink.exactly_once import (  # noqa: PLC0415  # see above
            TransactionManager,
        )

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
