"""Rows to write: meaning of their columns, and the partition of each row. Pure.

    value          binary or string         the message; null only for a tombstone
    attribute      string                   null is none
    key            binary or string         stored with the message; the same key goes
                                            to the same partition; null is none
    headers        array of (key string,    stored with the message, in order; null is
                   value binary)            none
    topic          string                   unless the option `topic` says it
    partition      string `<broker>-<n>`    exactly there
                   or integer               number n of `broker_id`, or of the first
                                            broker that has a partition of this number
    broker_id      integer                  only together with `partition`
    partition_key  binary or string         chooses the partition in place of `key`, and
                                            is not stored; null leaves it to `key`

The other columns of the source (`offset`, `message_id`, `timestamp`, `flag`) describe
where a message was read, and are ignored; any other column is refused. The partition of
a row depends only on the row, the partitions of its topic and the row's position in its
task: a repeated task sends every row to the same partition, in the same order.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import mul, xor
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from metaq.client.partitioner import parse_partition, plan_slots, slots_of
from metaq.errors import ConfigError
from metaq.model import BrokerId, HeaderPairs, TopicPartition
from metaq.record.checksum import crc32
from metaq.record.flags import (
    HAS_ATTRIBUTE,
    HAS_PROPERTIES,
    encode_keys,
    encode_payload,
)
from metaq.spark.columns import ROW_SCHEMA
from metaq.spark.errors import RowError, SchemaError
from metaq.spark.sink.decisions import SUM_LIMIT, RowSum

_TEXT: Final = frozenset({"string"})
_BYTES: Final = frozenset({"binary", "string"})
_NUMBER: Final = frozenset({"byte", "short", "integer", "long"})
_HEADERS: Final = frozenset({"array<struct<key:string,value:binary>>"})
_COLUMNS: Final[Mapping[str, frozenset[str]]] = {
    "value": _BYTES,
    "attribute": _TEXT,
    "key": _BYTES,
    "headers": _HEADERS,
    "topic": _TEXT,
    "partition": _TEXT | _NUMBER,
    "broker_id": _NUMBER,
    "partition_key": _BYTES,
}


def check_columns(types: Mapping[str, str], *, has_topic: bool) -> None:
    """Check the columns of rows, before any is written.

    Args:
        types: column → name of its Spark type; of an array, with its elements.
        has_topic: whether the option `topic` is given.

    Raises:
        SchemaError: a column is missing, unknown, or of a wrong type.
    """
    for name, allowed in _COLUMNS.items():
        found = types.get(name)
        if found is not None and found not in allowed:
            raise SchemaError(
                f"column {name}: expected {' or '.join(sorted(allowed))}, got {found}"
            )
    if "value" not in types:
        got = ", ".join(types) or "none"
        raise SchemaError(f"expected a column value, got {got}")
    for name in sorted(types.keys() - _COLUMNS.keys() - set(ROW_SCHEMA.names)):
        near = difflib.get_close_matches(name, _COLUMNS, n=1)
        raise SchemaError(
            f"column {name} cannot be written"
            + (f", did you mean {near[0]}" if near else "")
            + f": there are {', '.join(_COLUMNS)}; drop it, or put it into headers"
        )
    if not has_topic and "topic" not in types:
        raise SchemaError("expected the option topic, or a column topic")


def fill_tombstones(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Replace null values by empty ones: messages without data.

    Raises:
        RowError: a row has neither value nor key, so it would delete nothing.
    """
    values, place = batch.column("value"), batch.schema.get_field_index("value")
    keys = batch.column("key") if "key" in batch.schema.names else values
    if bare := pc.sum(pc.and_(values.is_null(), keys.is_null())).as_py():
        raise RowError(
            f"{bare} rows have neither value nor key: a tombstone needs a key"
        )
    empty = pa.scalar("", pa.string()).cast(values.type)
    return batch.set_column(place, "value", values.fill_null(empty))


@dataclass(slots=True)
class Payloads:
    """Payloads for one partition, in order, and a flag for each."""

    payloads: list[bytes]
    flags: list[int]


def sum_rows(topic: str, rows: Payloads) -> RowSum:
    """Return the checksum of rows of one topic, independent of their partitions.

    It sums the squared CRC of each row. The same change to two rows flips the same bits
    of their CRCs, so a plain sum would collide too easily.
    """
    seed = crc32(topic.encode())
    crcs = list(map(crc32, rows.payloads, map(xor, rows.flags, repeat(seed))))
    return RowSum(len(crcs), sum(map(mul, crcs, crcs)) % SUM_LIMIT)


def sum_batch(batch: pa.RecordBatch, topic: str | None) -> RowSum:
    """Return the checksum of rows as they would be written.

    Args:
        batch: rows with the columns above.
        topic: topic of all rows; None takes it from the column.

    Raises:
        RowError: a row has no value, or names no topic.
    """
    sums = (sum_rows(name, _Columns(r).all()) for name, r in _by_topic(batch, topic))
    return sum(sums, RowSum())


def _topics_of(batch: pa.RecordBatch) -> list[str]:
    """Return the topics in the column `topic`.

    Raises:
        RowError: a row has none.
    """
    names: list[str | None] = batch.column("topic").unique().to_pylist()
    if None in names:
        raise RowError("a row names no topic: its column topic is null")
    return [name for name in names if name is not None]


def _by_topic(
    batch: pa.RecordBatch, topic: str | None
) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Yield each topic with its rows; `topic` None takes it from the column."""
    if topic is not None:
        yield topic, batch
        return
    topics = batch.column("topic")
    for name in _topics_of(batch):
        yield name, batch.filter(pc.equal(topics, name))


class Router:
    """Chooses the partitions of the rows of one task. Owner: one task; one thread."""

    def __init__(
        self, targets: Mapping[str, Iterable[TopicPartition]], *, first_turn: int
    ) -> None:
        """Start with the partitions of topics.

        Args:
            targets: topic → its partitions.
            first_turn: turn of the task's first batch. Rows without key and partition
                go to the partitions in turn, one batch of rows at a time.
        """
        self._partitions: dict[str, tuple[TopicPartition, ...]] = {}
        self._slots: dict[str, list[int]] = {}
        self._turn = first_turn
        for topic, partitions in targets.items():
            self.add_topic(topic, partitions)

    def add_topic(self, topic: str, partitions: Iterable[TopicPartition]) -> None:
        """Add the partitions of one more topic."""
        self._partitions[topic] = tuple(sorted(partitions))

    def missing(self, batch: pa.RecordBatch) -> frozenset[str]:
        """Return the topics of a batch that were not added yet.

        Raises:
            RowError: a row has no topic.
        """
        return frozenset(_topics_of(batch)) - self._partitions.keys()

    def route(
        self, batch: pa.RecordBatch, topic: str | None
    ) -> dict[TopicPartition, Payloads]:
        """Return the payloads by partition.

        Args:
            batch: rows with the columns above.
            topic: topic of all rows; None takes it from the column.

        Raises:
            RowError: a row has no value, or an invalid partition.
        """
        self._turn += 1
        found: dict[TopicPartition, Payloads] = {}
        for name, rows in _by_topic(batch, topic):
            found |= self._of_topic(name, rows)
        return found

    def _of_topic(
        self, topic: str, batch: pa.RecordBatch
    ) -> dict[TopicPartition, Payloads]:
        """Return the payloads of rows of one topic, column by column."""
        known, rows = self._partitions[topic], _Columns(batch)
        places = rows.places(topic, known)
        if places.null_count:
            places = pc.coalesce(places, self._places_by_key(topic, rows))
        chosen = sorted(places.unique().to_pylist())
        if len(chosen) == 1:
            return {known[chosen[0]]: rows.all()}
        found = {}
        for place in chosen:
            mask = pc.equal(places, place)
            found[known[place]] = Payloads(
                rows.payloads.filter(mask).to_pylist(),
                rows.flags.filter(mask).to_pylist(),
            )
        return found

    def _places_by_key(self, topic: str, rows: "_Columns") -> pa.Array:
        """Return the partition for each row's key, as an index of the known ones."""
        in_turn = pa.scalar(self._turn % len(self._partitions[topic]), pa.int32())
        if rows.routing_keys.null_count == rows.count:
            return pa.repeat(in_turn, rows.count)
        keys, slots = rows.routing_keys.dictionary_encode(), self._slots_of(topic)
        chosen = [slots[slot] for slot in slots_of(keys.dictionary.to_pylist())]
        return pa.array(chosen, pa.int32()).take(keys.indices).fill_null(in_turn)

    def _slots_of(self, topic: str) -> list[int]:
        slots = self._slots.get(topic)
        if slots is None:
            slots = self._slots[topic] = plan_slots(self._partitions[topic])
        return slots


class _Columns:
    """The columns of one batch; nulls for missing ones."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        names = frozenset(batch.schema.names)

        def column(name: str) -> pa.Array:
            return batch.column(name) if name in names else pa.nulls(batch.num_rows)

        def octets(name: str) -> pa.Array:
            return column(name).cast(pa.binary())

        self.count: Final = batch.num_rows
        self.payloads: pa.Array = octets("value")
        if self.payloads.null_count:
            raise RowError(
                f"{self.payloads.null_count} rows have no value: it is null;"
                " nullValue=tombstone writes them without data"
            )
        self.flags: pa.Array = pa.repeat(pa.scalar(0, pa.int32()), self.count)
        keys = octets("key")
        attributes, headers = column("attribute"), column("headers")
        if attributes.null_count < self.count or _has_any(headers):
            self._encode(attributes.to_pylist(), keys.to_pylist(), headers.to_pylist())
        elif keys.null_count < self.count:
            self._prepend_keys(keys)
        self.routing_keys: pa.Array = pc.coalesce(octets("partition_key"), keys)
        self._partitions, self._broker_ids = column("partition"), column("broker_id")

    def all(self) -> Payloads:
        """Return all payloads."""
        return Payloads(self.payloads.to_pylist(), self.flags.to_pylist())

    def places(self, topic: str, known: Sequence[TopicPartition]) -> pa.Array:
        """Return the partition that each row names, as an index of `known`, or null.

        Raises:
            RowError: a row names a partition that no broker has.
        """
        if self._partitions.null_count == self.count:
            return pa.nulls(self.count, pa.int32())
        wanted = self._partitions.dictionary_encode()
        brokers = self._broker_ids.dictionary_encode(null_encoding="encode")
        names, ids = wanted.dictionary.to_pylist(), brokers.dictionary.to_pylist()
        # Encodes each pair as one number, to look up each distinct pair once.
        pairs = pc.add(
            pc.multiply(wanted.indices.cast(pa.int64()), len(ids)), brokers.indices
        )
        each = pairs.unique().drop_null()
        found = [
            known.index(
                _named(topic, known, names[pair // len(ids)], ids[pair % len(ids)])
            )
            for pair in each.to_pylist()
        ]
        return pa.array(found, pa.int32()).take(pc.index_in(pairs, each))

    def _encode(
        self,
        attributes: list[str | None],
        keys: list[bytes | None],
        headers: list[list[dict[str, Any]] | None],
    ) -> None:
        """Prepend attribute, key and headers to the payloads.

        Raises:
            RowError: a header has no name, or no value.
        """
        rows = zip(
            self.payloads.to_pylist(),
            attributes,
            keys,
            [_pairs(row) if row else () for row in headers],
            strict=True,
        )
        try:
            payloads, flags = zip(*(encode_payload(*row) for row in rows), strict=True)
        except ConfigError as error:
            raise RowError(str(error)) from error
        self.payloads = pa.array(payloads, pa.binary())
        self.flags = pa.array(flags, pa.int32())

    def _prepend_keys(self, keys: pa.Array) -> None:
        """As `_encode`, for rows with only a key; each distinct key is encoded once."""
        encoded = keys.dictionary_encode()
        blocks = encode_keys(encoded.dictionary.to_pylist())
        self.payloads = pc.binary_join_element_wise(
            pa.array(blocks, pa.binary()).take(encoded.indices),
            self.payloads,
            b"",
            null_handling="replace",
            null_replacement=b"",
        )
        flag = pa.scalar(HAS_ATTRIBUTE | HAS_PROPERTIES, pa.int32())
        self.flags = pc.if_else(keys.is_null(), self.flags, flag)


def _has_any(headers: pa.Array) -> bool:
    """Return whether any row has a header; null and an empty list are none."""
    is_list = pa.types.is_list(headers.type)
    return is_list and bool(pc.sum(pc.list_value_length(headers)).as_py())


def _pairs(row: list[dict[str, Any]]) -> HeaderPairs:
    """Return the headers of one row.

    Raises:
        RowError: a header is null, or has no name or value.
    """
    if None in row:
        raise RowError("column headers: a header is null")
    pairs = tuple((one["key"], one["value"]) for one in row)
    for name, value in pairs:
        if name is None or value is None:
            missing = "name" if name is None else "value"
            raise RowError(f"column headers: {missing} of header {name!r:.80} is null")
    return pairs


def _named(
    topic: str,
    known: Sequence[TopicPartition],
    wanted: str | int,
    broker_id: int | None,
) -> TopicPartition:
    """Return the partition that a row names.

    Raises:
        RowError: no broker has it.
    """
    found = None
    if isinstance(wanted, str):
        try:
            found = parse_partition(topic, wanted)
        except ConfigError as error:
            raise RowError(f"column {error}") from error
    elif broker_id is not None:
        found = TopicPartition(topic, BrokerId(broker_id), wanted)
    else:
        found = next((p for p in known if p.partition == wanted), None)
    if found not in known:
        have = ", ".join(p.name for p in known)
        name = wanted
        if isinstance(wanted, int) and broker_id is not None:
            name = f"{broker_id}-{wanted}"
        raise RowError(f"topic {topic} has no partition {name}; it has {have}")
    assert found is not None
    return found
