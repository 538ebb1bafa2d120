"""Query, micro-batch and task that run here, by Spark's properties; drawn numbers."""

import uuid
from typing import Final

from pyspark import TaskContext

from metaq.spark.sink.decisions import ATTEMPT_MAX
from metaq.spark.sink.outbox import WriteName

_QUERY: str = "sql.streaming.queryId"
_BATCH: str = "streaming.sql.batchId"
TURN_CHARS: Final = 16


def draw_turn() -> str:
    """Return a text that was never drawn before."""
    return uuid.uuid4().hex[:TURN_CHARS]


def write_name(write: str) -> WriteName:
    """Return the name under which this task writes.

    `write` names a write that is no micro-batch of a query: the same in all runs of its
    tasks. Each call has a number of its own: each driver of Spark counts runs from 0,
    and brokers remember names for longer.

    Streaming queries keep their id in the checkpoint, and a micro-batch that is run
    again after a restart has the number it had.
    """
    task = TaskContext.get()
    attempt = uuid.uuid4().int & ATTEMPT_MAX
    if task is None:
        return WriteName(write, 0, 0, attempt)
    query, batch = task.getLocalProperty(_QUERY), task.getLocalProperty(_BATCH)
    return WriteName(
        query=f"{query} {write}" if query else write,
        batch=int(batch) if batch else 0,
        task=task.partitionId(),
        attempt=attempt,
    )
