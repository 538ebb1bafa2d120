"""The offsets of a stream as JSON, and other texts that name partitions. Pure.

A stream's offset has the next byte to read of every partition:

    {"/version": 1, "logs": {"0-0": 4096, "0-1": 0}}

Worked example: partition 0 of topic `logs` on broker 0 holds three records of 100, 200
and 300 bytes. A query that has read the first two has offset 300: the first byte of the
third record, which is also the end of the second. After all three it has offset 600,
where the next record will begin; a batch from 300 to 600 has one record.

Keys are sorted, so that equal offsets have equal texts, because Spark compares texts.
`/version` is never a topic, because topic names have no slash. The parser is strict,
because a misread checkpoint loses or doubles data; errors quote the text. The JSON
stored by a query can be pasted into `startingOffsets`.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Final, NoReturn, TypeAlias, TypeVar

from metaq.model import MAX_OFFSET, BrokerId, Millis, Offset, TopicPartition
from metaq.spark.errors import OffsetTextError

Offsets: TypeAlias = Mapping[TopicPartition, Offset]
"""Partition → next byte to read."""

VERSION: Final = 1
"""Version of the JSON; others are refused."""
VERSION_KEY: Final = "/version"
"""Key of the version, next to the topics."""

LAG_KEY: Final = "/behind"
"""Key of the backlog of each topic, in the log ends of a query's progress."""

EARLIEST: Final = Offset(-2)
"""Stands for the log start at the time of reading."""
LATEST: Final = Offset(-1)
"""Stands for the log end at the time of reading."""

QUOTED_CHARS_MAX: Final = 80
"""Maximum characters of a refused text that an error quotes."""

_PARTITION: Final = re.compile(r"(0|[1-9][0-9]{0,9})-(0|[1-9][0-9]{0,9})")
_Number = TypeVar("_Number", bound=int)


def offsets_to_json(offsets: Offsets) -> dict[str, object]:
    """Return offsets as a sorted dictionary, which Spark stores as JSON.

    Equal offsets give equal texts through `json.dumps`.
    """
    topics: dict[str, dict[str, int]] = {}
    for partition, offset in sorted(offsets.items()):
        topics.setdefault(partition.topic, {})[partition.name] = int(offset)
    return {VERSION_KEY: VERSION, **topics}


def offsets_from_json(value: object) -> dict[TopicPartition, Offset]:
    """Parse the result of `offsets_to_json`.

    Args:
        value: a dictionary from a Spark checkpoint.

    Raises:
        OffsetTextError: not such a dictionary; the message says where.
    """
    if not isinstance(value, dict) or VERSION_KEY not in value:
        _refuse("offset", f"expected an object with {VERSION_KEY!r}", value)
    return _read_numbers("offset", value, Offset)


def format_offsets(offsets: Offsets) -> str:
    """Return offsets as text; equal offsets give equal texts."""
    return json.dumps(offsets_to_json(offsets))


def parse_offsets(text: str) -> dict[TopicPartition, Offset]:
    """Parse the result of `format_offsets`.

    Raises:
        OffsetTextError: the text has another form; the message quotes it.
    """
    return offsets_from_json(_parse_json("offset", text))


def parse_wanted(text: str, *, option: str) -> dict[TopicPartition, Offset]:
    """Parse offsets written by a user: the version is optional, the edges are allowed.

    Args:
        text: JSON as above; `EARLIEST` (-2) and `LATEST` (-1) mean the log start
            and the log end.
        option: name of the option, for errors.

    Raises:
        OffsetTextError: the text has another form; the message quotes it.
    """
    return _read_numbers(option, _parse_json(option, text), Offset, low=EARLIEST)


def parse_times(text: str, *, option: str) -> dict[TopicPartition, Millis]:
    """Parse a time per partition, milliseconds since 1970, in the form of offsets.

    Args:
        text: `{"logs": {"0-0": 1700000000000}}`.
        option: name of the option, for errors.

    Raises:
        OffsetTextError: the text has another form; the message quotes it.
    """
    return _read_numbers(option, _parse_json(option, text), Millis)


def parse_assigned(text: str, *, option: str) -> frozenset[TopicPartition]:
    """Parse the partitions assigned by a user; one or more.

    Args:
        text: `{"logs": ["0-0", "0-1"]}`.
        option: name of the option, for errors.

    Raises:
        OffsetTextError: the text has another form, is empty, or names a partition
            twice.
    """
    value = _parse_json(option, text)
    if not isinstance(value, dict):
        _refuse(option, "expected an object of topics", value)
    found: set[TopicPartition] = set()
    for topic, names in value.items():
        if not isinstance(names, list) or not names:
            _refuse(option, f"topic {topic!r}: expected a list of partitions", names)
        for name in names:
            partition = _read_partition(option, topic, name)
            if partition in found:
                _refuse(option, f"topic {topic!r}: the same partition twice", name)
            found.add(partition)
    if not found:
        _refuse(option, "expected one partition or more", value)
    return frozenset(found)


def _parse_json(option: str, text: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        quoted = text[:QUOTED_CHARS_MAX]
        raise OffsetTextError(f"{option}: no JSON: {error}: {quoted!r}") from error


def _without_doubles(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _value in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{double!r} occurs twice")
    return found


def _read_numbers(
    option: str, value: object, kind: Callable[[int], _Number], *, low: int = 0
) -> dict[TopicPartition, _Number]:
    """Parse topic → partition → number, `low` or more."""
    if not isinstance(value, dict):
        _refuse(option, "expected an object of topics", value)
    topics = dict(value)
    version = topics.pop(VERSION_KEY, VERSION)
    if type(version) is not int or version != VERSION:
        _refuse(option, f"expected version {VERSION}", version)
    found: dict[TopicPartition, _Number] = {}
    for topic, numbers in topics.items():
        if not isinstance(numbers, dict) or not numbers:
            _refuse(
                option, f"topic {topic!r}: expected an object of partitions", numbers
            )
        for name, number in numbers.items():
            partition = _read_partition(option, topic, name)
            # Refuses bool, which is an int, and 1.0, which equals 1.
            if type(number) is not int or not low <= number <= MAX_OFFSET:
                _refuse(option, f"{partition}: not a number in range", number)
            found[partition] = kind(number)
    return found


def _read_partition(option: str, topic: object, name: object) -> TopicPartition:
    if not isinstance(topic, str) or not topic or "/" in topic:
        _refuse(option, "expected the name of a topic", topic)
    match = _PARTITION.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        _refuse(option, f"topic {topic!r}: expected '<broker>-<partition>'", name)
    return TopicPartition(topic, BrokerId(int(match[1])), int(match[2]))


def _refuse(option: str, problem: str, value: object) -> NoReturn:
    raise OffsetTextError(f"{option}: {problem}, got {repr(value)[:QUOTED_CHARS_MAX]}")
