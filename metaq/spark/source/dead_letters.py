"""Values as the user wants them, and bad ones on their way to the dead-letter topic.

A dead letter is the message as it was, and says in its headers where it lay and what is
wrong with it, as those of consumers do (`client/consume/dead_letters.py`). A task that
is run again sends its dead letters again, and so does a query that reads the same once
more; brokers that announced `dedup` store them once.
"""

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Self

import pyarrow as pa

from metaq.client.consume.dead_letters import Origin, letter_headers
from metaq.model import BrokerId, HeaderPairs, MessageId, Offset, TopicPartition
from metaq.spark.cluster import shared_cluster
from metaq.spark.options import BadRows, SourceOptions
from metaq.spark.sink.outbox import Outbox
from metaq.spark.sink.task import write_name
from metaq.spark.source.read_task import ReadTask
from metaq.spark.values import Converted, ValueConverter

BATCH_BYTES: Final = 256 * 1024
"""Bytes of one batch of dead letters."""


class Converting:
    """Converts the values of one task. A context manager; one thread.

    Leaving it without an error waits until every dead letter is stored.
    """

    def __init__(
        self, task: ReadTask, options: SourceOptions, value_type: pa.DataType
    ) -> None:
        """Prepare for one task; nothing is connected before there is a bad value.

        Args:
            task: the range to read.
            options: options of the read.
            value_type: Arrow type of the column `value`.
        """
        values = options.values
        self._task = task
        self._options = options
        self._converter = ValueConverter(values.format, values.bad_rows, value_type)
        self._outbox: Outbox | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._outbox is None:
            return
        with self._outbox as outbox:
            if kind is None:
                outbox.finish()

    def convert(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows with a good value, in order.

        Raises:
            BadRowError: a value is bad, and that is to fail the query.
            MetaqError: dead letters cannot be sent.
        """
        converted = self._converter.convert(batch)
        if converted.rejected is not None:
            assert self._options.values.bad_rows is BadRows.TOPIC
            self._put(converted)
        return converted.rows

    def _put(self, converted: Converted) -> None:
        topic = self._options.values.dead_letter_topic
        assert topic is not None
        if self._outbox is None:
            cluster = shared_cluster(self._options.wire)
            self._outbox = Outbox(
                write_name(self._name(topic)),
                topic=topic,
                outlets=cluster.outlets([topic]),
                find_outlets=cluster.outlets,
                batch_bytes=BATCH_BYTES,
                timeout_s=self._options.wire.request_timeout_s,
            )
        self._outbox.put(letters(converted))

    def _name(self, topic: str) -> str:
        """Return the same for the same letters, whichever query puts them."""
        task, options = self._task, self._options
        read = (task.range, task.bounds, options.values, options.on_corrupt)
        return f"dead letters to {topic} of {read}"


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
    place = TopicPartition(row["topic"], BrokerId(row["broker_id"]), row["partition"])
    origin = Origin(
        place,
        Offset(row["offset"]),
        MessageId(row["message_id"]),
        error="",
        text=reason,
    )
    own = tuple((one["key"], one["value"]) for one in row["headers"] or ())
    return letter_headers(own, origin)
