"""The hot loops over replies: whole, ordinary ones taken off a receive buffer. Pure.

Replies to puts come by the hundred in one read. `take_receipts` reads a run of them
column by column; `take_results` reads any result, at a third of what the general path
(`protocol/connection.py`) costs. Both read the same as that path; whatever is not the
plain case is left where it lies. Property tests hold them together.
"""

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from metaq.model import MAX_OFFSET
from metaq.protocol.buffer import ReceiveBuffer
from metaq.protocol.commands import Result
from metaq.protocol.status import Status

# A result as brokers write it. Anything else is left to the general path.
_RESULT: Final = re.compile(rb"result (\d{1,9}) (\d{1,9}) (-?\d{1,9})\r\n")

# The same where the body is that of a put: id, partition and offset.
_RECEIPT: Final = re.compile(
    rb"result 200 (\d{1,9}) (-?\d{1,9})\r\n((-?\d{1,19}) (-?\d{1,9}) (\d{1,19}))(?!\d)"
)
# No possessive repeat: before CPython 3.11.5 one of a group forgets where it began.
_RECEIPTS: Final = re.compile(
    rb"(?:result 200 \d{1,9} -?\d{1,9}\r\n-?\d{1,19} -?\d{1,9} \d{1,19}(?!\d))+"
)
_REST_BYTES: Final = len(b"result 200  \r\n")


class Receipts(NamedTuple):
    """What brokers said of puts that they stored, one column for each number."""

    opaques: Sequence[int]
    """Of the puts, in the order of the replies."""
    ids: Sequence[int]
    """Ids of the messages."""
    partitions: Sequence[int]
    """Where they lie."""
    offsets: Sequence[int]
    """Offsets of their records."""

    def are_of(self, partition: int) -> bool:
        """Tell whether all are receipts that puts to a partition may have."""
        return (
            self.partitions.count(partition) == len(self.partitions)
            and min(self.ids) >= -MAX_OFFSET
            and max(self.ids) <= MAX_OFFSET
            and max(self.offsets) <= MAX_OFFSET
        )

    def replies(self) -> list[Result]:
        """Return the replies that say the same."""
        columns = zip(
            self.opaques, self.ids, self.partitions, self.offsets, strict=True
        )
        return [
            Result(Status.OK, b"%d %d %d" % (message_id, partition, offset), opaque)
            for opaque, message_id, partition, offset in columns
        ]


def take_receipts(buffer: ReceiveBuffer) -> Receipts | None:
    """Take the ordinary replies to stored puts off the front of a buffer.

    Args:
        buffer: between two frames; its position is moved behind what was taken.

    Returns:
        None when the buffer does not begin with a whole one.
    """
    data, start = buffer.data, buffer.position
    run = _RECEIPTS.match(data, start)
    if run is None:
        return None
    end, found = run.end(), _RECEIPT.findall(data, start, run.end())
    lengths, opaques, bodies, ids, partitions, offsets = zip(*found, strict=True)
    sizes = tuple(map(len, bodies))
    if tuple(map(int, lengths)) != sizes:
        # The last one is cut short, or one is longer than it looks.
        count = next(
            at for at, length in enumerate(lengths) if int(length) != sizes[at]
        )
        if not count:
            return None
        for row in found[count:]:
            end -= _REST_BYTES + sum(map(len, row[:3]))
        opaques, ids = opaques[:count], ids[:count]
        partitions, offsets = partitions[:count], offsets[:count]
    buffer.position = end
    return Receipts(
        *(list(map(int, one)) for one in (opaques, ids, partitions, offsets))
    )


def take_results(buffer: ReceiveBuffer) -> list[Result]:
    """Take every whole, ordinary result off the front of a buffer.

    Args:
        buffer: between two frames; its position is moved behind what was taken.
    """
    data, position = buffer.data, buffer.position
    size, match = len(data), _RESULT.match
    results: list[Result] = []
    while (found := match(data, position)) is not None:
        status, length, opaque = found.groups()
        start = found.end()
        end = start + int(length)
        if end > size:
            break
        results.append(Result(int(status), data[start:end], int(opaque)))
        position = end
    buffer.position = position
    return results
