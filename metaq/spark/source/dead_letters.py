"""Bad values on their way to the dead-letter topic.

A dead letter is the message as it was, and says in its headers where it lay and what is
wrong with it, as those of consumers do (`client/consume/dead_letters.py`). A task that
is run again sends its dead letters again, and so does a query that reads the same once
more; brokers that announced `dedup` store them once.
"""

from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa

from metaq.client.consume.dead_letters import Origin, letter_headers
from metaq.model import HeaderPairs, MessageId, Offset
from metaq.spark.clusters import shared_cluster
from metaq.spark.columns import partition_of
from metaq.spark.options import SourceOptions
from metaq.spark.sink.outbox import Outbox
from metaq.spark.sink.task import write_name
from metaq.spark.source.read_task import ReadTask
from metaq.spark.values import Converted

BATCH_BYTES: Final = 256 * 1024
"""Bytes of one batch of dead letters."""


def letter_outbox(task: ReadTask, options: SourceOptions) -> Outbox:
    """Return what sends the dead letters of one task.

    Raises:
        NoBrokerError: no broker takes puts to the dead-letter topic.
        MetaqError: the cluster cannot be asked.
    """
    values = options.values
    topic = values.dead_letter_topic
    assert topic is not None
    # The same for the same letters, whichever query puts them.
    read = (task.range, task.bounds, values, options.on_corrupt)
    cluster = shared_cluster(options.wire)
    return Outbox(
        write_name(f"dead letters to {topic} of {read}"),
        topic=topic,
        targets=cluster.targets([topic]),
        find_targets=cluster.targets,
        batch_bytes=BATCH_BYTES,
        timeout_s=options.wire.request_timeout_s,
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


def headers_of(row: Mapping[str, Any], reason: str) -> HeaderPairs:
    """Return the headers of the dead letter of one row.

    Args:
        row: its columns; those of its place, and `headers`.
        reason: fault of its value.
    """
    origin = Origin(
        partition_of(row),
        Offset(row["offset"]),
        MessageId(row["message_id"]),
        error="",
        text=reason,
    )
    own = tuple((one["key"], one["value"]) for one in row["headers"] or ())
    return letter_headers(own, origin)
