"""Sends bad values to the dead-letter topic.

A dead letter is the unchanged message, with headers for its origin and what is wrong
with it, as the dead letters of consumers (`client/consume/dead_letters.py`). A repeated
task sends its dead letters again, and so does a query that reads the same range again;
brokers that announced `dedup` store them once.
"""

from typing import Final

import pyarrow as pa

from metaq.spark.clusters import shared_cluster
from metaq.spark.letters import headers_of
from metaq.spark.options import SourceOptions
from metaq.spark.plan import ReadRange
from metaq.spark.record_bounds import Bounds
from metaq.spark.sink.outbox import Outbox, RowTargets, write_name
from metaq.spark.values import Converted

BATCH_BYTES: Final = 256 * 1024


def letter_outbox(wanted: ReadRange, bounds: Bounds, options: SourceOptions) -> Outbox:
    """Return an outbox for the dead letters of the task that reads a range.

    Raises:
        NoBrokerError: no broker takes puts to the dead-letter topic.
        MetaqError: the cluster is not available.
    """
    values = options.values
    topic = values.dead_letter_topic
    assert topic is not None
    # The name depends only on what is read: equal for all queries with these letters.
    read = (wanted, bounds, values, options.on_corrupt)
    cluster = shared_cluster(options.wire)
    return Outbox(
        write_name(f"dead letters to {topic} of {read}"),
        RowTargets(topic, cluster.targets([topic]), cluster.targets),
        batch_bytes=BATCH_BYTES,
        wire=options.wire,
    )


def letters(converted: Converted) -> pa.RecordBatch:
    """Return the rejected rows as rows for the sink."""
    rejected = converted.rejected
    assert rejected is not None
    rows = zip(rejected.to_pylist(), converted.reasons, strict=True)
    headers = [headers_of(row, reason) for row, reason in rows]
    columns = {name: rejected.column(name) for name in ("value", "attribute", "key")}
    columns["headers"] = pa.array(headers, rejected.schema.field("headers").type)
    return pa.RecordBatch.from_pydict(columns)
