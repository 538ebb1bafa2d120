"""Dead letters: the message, with its origin and the error in headers. Pure.

A dead letter has the data, attribute, key and headers of the message, except for the
header that would make it expire, followed by these headers, UTF-8 texts:

    dead-letter.origin      test/0-3@4096            topic, partition, offset
    dead-letter.id          123
    dead-letter.cause       ValueError: no number    type and text of the last error
    dead-letter.group       g                        this and the rest: of consumers
    dead-letter.attempts    6
    dead-letter.at_ms       1700000000000            time when it was dead-lettered
    dead-letter.traceback   Traceback (most ...      may be missing

Dead letters of Spark's source have only the first three: they must be equal when they
are sent again, so they have no time. A dead letter that is dead-lettered itself has the
headers of its last origin only. Those of a queue group come from its broker; their
cause is `rejected: ...`, `deliveries: N` or `expired`.
"""

from itertools import islice
from typing import Final, NamedTuple

from metaq.model import HeaderPairs, MessageId, Millis, Offset, TopicPartition
from metaq.record.expiry import EXPIRES_IN
from metaq.record.flags import FIELDS_MAX

PREFIX: Final = "dead-letter."

ERROR_CHARS_MAX: Final = 200
"""Maximum length of an error's type name; longer ones are cut."""

TEXT_CHARS_MAX: Final = 1000
"""Maximum length of an error's text; longer ones are cut, because headers count in the
message's size."""

TRACEBACK_CHARS_MAX: Final = 4000
"""Maximum length of a traceback; the end is kept, with the last calls and the error."""


class Origin(NamedTuple):
    """Origin of a dead letter, and its reason."""

    partition: TopicPartition
    """Partition of the message."""
    offset: Offset
    """Offset of the record's first byte."""
    id: MessageId
    """Id of the message."""
    error: str
    """Name of the last error's type; "" in dead letters of Spark's source."""
    text: str
    """Text of the last error, cut to `TEXT_CHARS_MAX`."""
    group: str = ""
    """Group that could not handle it; "" for Spark's source."""
    attempts: int = 1
    """Number of times that it was passed to the handler."""
    at_ms: Millis | None = None
    """Time when it was dead-lettered, in milliseconds since 1970 (UTC)."""
    traceback: str = ""
    """Traceback of the last error, at most `TRACEBACK_CHARS_MAX` characters; "" if
    unknown."""


def letter_headers(own: HeaderPairs, origin: Origin) -> HeaderPairs:
    """Return the headers of a dead letter: the message's `own`, and its origin.

    The header for expiry is dropped, because a dead letter is kept until it is
    examined. If there are too many headers, the last of `own` are dropped.
    """
    fields = {
        "origin": f"{origin.partition}@{origin.offset}",
        "id": str(origin.id),
        "cause": f"{origin.error}: {origin.text}" if origin.error else origin.text,
    }
    if origin.group:
        fields["group"] = origin.group
        fields["attempts"] = str(origin.attempts)
    if origin.at_ms is not None:
        fields["at_ms"] = str(origin.at_ms)
    if origin.traceback:
        fields["traceback"] = origin.traceback
    kept = (
        pair for pair in own if pair[0] != EXPIRES_IN and not pair[0].startswith(PREFIX)
    )
    added = (
        (PREFIX + name, text.encode(errors="surrogatepass"))
        for name, text in fields.items()
    )
    return (*islice(kept, FIELDS_MAX - 1 - len(fields)), *added)
