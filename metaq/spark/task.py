"""Which task of which query runs here, as Spark tells it."""

from pyspark import TaskContext

from metaq.spark.outbox import WriteName

_QUERY: str = "sql.streaming.queryId"
_BATCH: str = "streaming.sql.batchId"


def write_name(write: str) -> WriteName:
    """Return the name under which this task writes.

    Args:
        write: names the write where it is no micro-batch of a query: the same in all
            runs of its tasks.

    Streaming queries keep their id in the checkpoint, and a micro-batch that is run
    again after a restart has the number it had.
    """
    task = TaskContext.get()
    if task is None:
        return WriteName(write, 0, 0, 0)
    query, batch = task.getLocalProperty(_QUERY), task.getLocalProperty(_BATCH)
    return WriteName(
        query=f"{query} {write}" if query else write,
        batch=int(batch) if batch else 0,
        task=task.partitionId(),
        attempt=task.taskAttemptId(),
    )
