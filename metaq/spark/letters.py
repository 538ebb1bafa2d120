"""The headers of a dead letter, from the columns of its row."""

from collections.abc import Mapping
from typing import Any

from metaq.model import HeaderPairs, MessageId, Offset
from metaq.record.dead_letters import Origin, letter_headers
from metaq.spark.columns import partition_of


def headers_of(row: Mapping[str, Any], reason: str) -> HeaderPairs:
    """Return the headers of the dead letter for a row.

    Args:
        row: column → value; those that identify the message, and `headers`.
        reason: error of its value.
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
