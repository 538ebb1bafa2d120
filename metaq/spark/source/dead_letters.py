"""Bad values on their way to the dead-letter topic.

A dead letter is the message as it was, and says in its headers where it lay and what is
wrong with it, as those of consumers do (`client/consume/dead_letters.py`). A task that
is run again sends its dead letters again, and so does a query that reads the same once
more; brokers that announced `dedup` store them once.
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
    """Return what sends the dead letters of the task that reads a range.

    Raises:
        NoBrokerError: no broker takes puts to the dead-letter topic.
        MetaqError: the cluster cannot be asked.
    """
    values = options.values
    topic = values.dead_letter_topic
    assert topic is not None
    # The same for the same letters, whichever query puts them.
    read = (wanted, bounds, values, options.on_corrupt)
    cluster = shared_cluster(options.wire)
    return Outbox(
        write_name(f"dead letters to {topic} of {read}"),
        RowTargets(topic, cluster.targets([topic]), cluster.targets),
        batch_bytes=BATCH_BYTES,
        wire=options.wire,
    )


def letters(converted: Converted) -> pa.RecordBatch:
    """Return the rejected rows as rows that a sink writes."""
    rejected = converted.rejected
    assert rejected is not None
    rows = zip(rejected.to_pylist(), converted.reasons, strict=True)
    headers = [headers_of(row, reason) for row, reason in rows]
    columns = {name: rejected.column(name) for name in ("value", "attribute", "key")}
    columns["headers"] = pa.array(headers, rejected.schema.field("headers").type)
    return pa.RecordBatch.from_pydict(columns)
