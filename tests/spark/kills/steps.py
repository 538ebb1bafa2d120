"""The steps of a batch at which processes are killed, and a format that dies there.

A test writes orders into the directory that `DIRECTORY` names: a step, who is to die,
and how many times the step is passed before. Every process of the driver reads them as
it comes by; one counts at a time, the next from that death on. Passes are counted by
directories, so that of many processes one dies, once.

    format("metaq")  ->  DyingDataSource, which does what MetaqDataSource does

The directory `formats`, first in Python's path, makes Spark find it by its name.
"""

import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
from pyspark.sql.datasource import InputPartition, WriterCommitMessage
from pyspark.sql.types import StructType

from metaq.client.offsets.query_progress import keep_start
from metaq.client.produce.xa_commands import XaCommands
from metaq.pipeline.jobs import archive, archive_store
from metaq.pipeline.jobs.archive_store import ArchiveStore
from metaq.pipeline.jobs.day_files import DataFile, write_task
from metaq.spark.cluster import Cluster
from metaq.spark.data_source import MetaqDataSource
from metaq.spark.options import SourceOptions
from metaq.spark.sink.exact_sink import BranchSender
from metaq.spark.sink.exactly_once import TransactionManager
from metaq.spark.sink.outbox import NamedSender
from metaq.spark.sink.writer import BatchWriter, StreamWriter
from metaq.spark.source.batch import BatchReader
from metaq.spark.source.read_task import ReadTask, TaskReader, read_rows
from metaq.spark.source.stream import StreamReader

DIRECTORY = "METAQ_KILL_DIR"
ORDERS, DRIVER_GROUP, SERVER_PIDS = "orders.json", "driver.json", "servers.json"
PIECE_ROWS = 60
"""Rows that a reader hands over at a time, so that there is a middle."""

START_STEPS = ("start chosen", "start pinned")
PLAN_STEPS = ("end chosen", "end logged", "planned")
COMMIT_STEPS = ("all written", "before commit logged")
PROGRESS_STEPS = ("commit logged", "progress committed")
READ_STEPS = ("before first row", "between rows", "after last row")
WRITE_STEPS = (
    "before first put",
    "between puts",
    "last put sent",
    "last put answered",
    "before task ended",
)
DECISION_STEPS = ("all written", "decided", "branch committed", "before commit logged")
"""Of the commit of an exactly-once write."""
ARCHIVE_STEPS = (
    "archive claimed",
    "before files",
    "files written",
    "before batch committed",
    "batch committed",
)
FILE_STEPS = (*READ_STEPS, "files closed")
"""Of a task of an archive; its file has each piece of rows when the next is read."""
UPDATE_STEPS = (
    "definitions sent",
    "flow queued",
    "flow starting",
    "flow running",
    "flow completed",
    "run completed",
)
"""Of an update of a declared pipeline."""
SELF, EXECUTOR, DRIVER = "self", "executor", "driver"


@dataclass(frozen=True, slots=True)
class Order:
    """A death that is to be."""

    number: int
    """Of all orders of a test."""
    step: str
    victim: str
    skip: int
    """So many times the step is passed before."""


def give_orders(directory: Path, *orders: Order) -> None:
    """Have processes die, one after the other, in place of all earlier orders."""
    draft = directory / f"{ORDERS}.draft"
    draft.write_text(json.dumps([asdict(order) for order in orders]))
    draft.rename(directory / ORDERS)


def is_done(directory: Path, order: Order) -> bool:
    """Return whether the step was passed often enough for the death."""
    return (directory / f"pass-{order.number}-{order.skip}").exists()


def reach(step: str) -> None:
    """Die here if that is the order."""
    directory = Path(os.environ[DIRECTORY])
    try:
        given = json.loads((directory / ORDERS).read_text())
    except FileNotFoundError:
        return
    orders = [Order(**each) for each in given]
    left = [order for order in orders if not is_done(directory, order)]
    if not left or left[0].step != step:
        return
    order = left[0]
    for turn in range(order.skip + 1):
        with suppress(FileExistsError):
            (directory / f"pass-{order.number}-{turn}").mkdir()
            break
    else:
        return
    if turn == order.skip:
        _kill(order.victim, directory)


def _kill(victim: str, directory: Path) -> None:
    own = os.getpid()
    pids = [own]
    if victim == EXECUTOR:
        pids = [java_above(own), own]
    elif victim == DRIVER:
        # The group at one blow: this worker may not outlive the JVM.
        pids = [-json.loads((directory / DRIVER_GROUP).read_text()), own]
    elif victim != SELF:
        pids = [json.loads((directory / SERVER_PIDS).read_text())[victim]]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def java_above(pid: int) -> int:
    """Return the JVM that a Python worker works for."""
    while True:
        name, rest = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)
        if name.endswith("(java"):
            return pid
        pid = int(rest.split()[1])
        assert pid > 1, "no JVM above"


class DyingDataSource(MetaqDataSource):
    """The format `metaq`, whose readers and writers pass the steps."""

    def reader(self, schema: StructType) -> Any:
        return _as(DyingBatchReader, super().reader(schema))

    def streamReader(self, schema: StructType) -> Any:
        return _as(DyingStreamReader, super().streamReader(schema))

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        return _as(DyingBatchWriter, super().writer(schema, overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:
        return _as(DyingStreamWriter, super().streamWriter(schema, overwrite))


def _as(kind: type, made: Any) -> Any:
    assert kind.__base__ is type(made)
    made.__class__ = kind
    return made


class DyingTaskReader(TaskReader):
    """Reads the range of a task, and may die; what travels of the readers below."""

    def __reduce__(self) -> Any:
        return DyingTaskReader, (self._options, self._value_type)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _rows(super().read(partition))


class DyingBatchReader(BatchReader):
    """Reads a batch, and may die."""

    __reduce__ = DyingTaskReader.__reduce__

    def partitions(self) -> list[InputPartition]:
        found = super().partitions()
        reach("planned")
        return found


class DyingStreamReader(StreamReader):
    """Reads micro-batches, and may die."""

    __reduce__ = DyingTaskReader.__reduce__

    def initialOffset(self) -> dict[str, object]:
        ask = Cluster.ask

        def dying(cluster: Cluster, question: Any, *words: Any) -> Any:
            if question is not keep_start:
                return ask(cluster, question, *words)
            reach("start chosen")
            ask(cluster, question, *words)
            reach("start pinned")
            return None

        with mock.patch.object(Cluster, "ask", dying):
            return super().initialOffset()

    def latestOffset(self, start: dict[str, Any], limit: object) -> dict[str, object]:
        found = super().latestOffset(start, limit)
        if found != start:
            reach("end chosen")
        return found

    def partitions(
        self, start: dict[str, Any], end: dict[str, Any]
    ) -> list[InputPartition]:
        reach("end logged")
        found = super().partitions(start, end)
        reach("planned")
        return found

    def commit(self, end: dict[str, Any]) -> None:
        reach("commit logged")
        super().commit(end)
        reach("progress committed")


class DyingBatchWriter(BatchWriter):
    """Writes a batch, and may die."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        with _dying_puts():
            found = super().write(_batches(iterator))
        reach("before task ended")
        return found

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        reach("all written")
        with _dying_verdicts():
            super().commit(messages)
        reach("before commit logged")


class DyingStreamWriter(StreamWriter):
    """Writes a micro-batch, and may die."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        with _dying_puts():
            found = super().write(_batches(iterator))
        reach("before task ended")
        return found

    def commit(
        self, messages: Sequence[WriterCommitMessage | None], batchId: int
    ) -> None:
        reach("all written")
        with _dying_verdicts():
            super().commit(messages, batchId)
        reach("before commit logged")


def _rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    reach("before first row")
    for batch in batches:
        for first in range(0, batch.num_rows, PIECE_ROWS):
            if first:
                reach("between rows")
            yield batch.slice(first, PIECE_ROWS)
    reach("after last row")


def _batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for number, batch in enumerate(batches):
        reach("between puts" if number else "before first put")
        yield batch


@contextmanager
def _dying_puts() -> Iterator[None]:
    flush, prepare = NamedSender.flush, BranchSender.prepare

    def dying(sender: NamedSender) -> None:
        reach("last put sent")
        flush(sender)
        reach("last put answered")

    def dying_promise(sender: BranchSender) -> Any:
        reach("last put sent")
        found = prepare(sender)
        reach("last put answered")
        return found

    with (
        mock.patch.object(NamedSender, "flush", dying),
        mock.patch.object(BranchSender, "prepare", dying_promise),
    ):
        yield


@contextmanager
def _dying_verdicts() -> Iterator[None]:
    decide, send = TransactionManager.decide, XaCommands.end_at
    commit = XaCommands.commit_at

    async def dying_decision(manager: TransactionManager, *words: Any) -> None:
        await decide(manager, *words)
        reach("decided")

    async def dying_verdict(verdicts: XaCommands, *words: Any) -> None:
        await send(verdicts, *words)
        reach("branch committed")

    async def dying_commit(verdicts: XaCommands, *words: Any) -> Any:
        # Several branches are committed together where a broker can.
        found = await commit(verdicts, *words)
        reach("branch committed")
        return found

    with (
        mock.patch.object(TransactionManager, "decide", dying_decision),
        mock.patch.object(XaCommands, "end_at", dying_verdict),
        mock.patch.object(XaCommands, "commit_at", dying_commit),
    ):
        yield


def dying_read(task: ReadTask, *, options: SourceOptions) -> Iterator[pa.RecordBatch]:
    """Read a task of an archive, and maybe die."""
    return _rows(read_rows(task, options))


def dying_write(task: ReadTask, **words: Any) -> list[DataFile]:
    """Write the files of a task of an archive, and maybe die."""
    found = write_task(task, **words, row_group_bytes=1)
    reach("files closed")
    return found


@contextmanager
def dying_archive() -> Iterator[None]:
    """Pass the steps of a batch of an archive, and those of its tasks."""
    around = {
        "claim": (None, "archive claimed"),
        "write": ("before files", "files written"),
        "commit": ("before batch committed", "batch committed"),
    }
    calls = {
        name: _dying_call(getattr(ArchiveStore, name), *steps)
        for name, steps in around.items()
    }
    with (
        mock.patch.multiple(ArchiveStore, **calls),
        mock.patch.object(archive, "read_rows", dying_read),
        mock.patch.object(archive_store, "write_task", dying_write),
    ):
        yield


def _dying_call(call: Any, before: str | None, after: str) -> Any:
    def dying(*words: Any, **named: Any) -> Any:
        if before is not None:
            reach(before)
        found = call(*words, **named)
        reach(after)
        return found

    return dying
