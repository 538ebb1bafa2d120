"""The hot loop over replies: whole, ordinary results taken off a receive buffer. Pure.

Replies to puts come by the hundred in one read. This costs a third of the general path
(`protocol/connection.py`) and reads the same; whatever is not the plain case is left
where it lies, for that path. A property test holds them together.
"""

import re
from typing import Final

from metaq.protocol.buffer import ReceiveBuffer
from metaq.protocol.commands import Result

# A result as brokers write it. Anything else is left to the general path.
_RESULT: Final = re.compile(rb"result (\d{1,9}) (\d{1,9}) (-?\d{1,9})\r\n")


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
