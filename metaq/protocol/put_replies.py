"""Replies to many puts, formatted in one operation if their lengths are equal."""

from collections.abc import Sequence
from typing import Final

_PUT_REPLY: Final = b"result 200 %d %%b\r\n%%d %d %%d"
"""Takes length of the body and partition; then, for each put, opaque, id and offset."""


def encode_put_replies(
    partition: int, opaques: Sequence[bytes], ids: Sequence[int], offsets: Sequence[int]
) -> bytes:
    """Return the 200 replies to a run of puts to one partition.

    Replies whose bodies have the same length are formatted in one operation; one
    operation per reply would take three times as long.

    Args:
        partition: the partition of all puts.
        opaques: opaque of each put, in decimal as in its reply.
        ids: id of each put; 0 or more, ascending.
        offsets: offset of each put; 0 or more, ascending.

    Returns:
        The replies in the same order; b"" for none.
    """
    count = len(opaques)
    if not count:
        return b""
    if count == 1:
        body = b"%d %d %d" % (ids[0], partition, offsets[0])
        return b"result 200 %d %b\r\n%b" % (len(body), opaques[0], body)
    body_bytes = _put_body_bytes(partition, ids, offsets)
    if body_bytes:
        reply = _PUT_REPLY % (body_bytes, partition)
        values: list[bytes | int] = [0] * (3 * count)
        values[0::3], values[1::3], values[2::3] = opaques, ids, offsets
        return reply * count % tuple(values)
    # A number gains a digit inside the run: halve it until that reply is isolated.
    middle = count // 2
    return encode_put_replies(
        partition, opaques[:middle], ids[:middle], offsets[:middle]
    ) + encode_put_replies(partition, opaques[middle:], ids[middle:], offsets[middle:])


def encode_put_replies_apart(
    partition: int, opaques: Sequence[bytes], ids: Sequence[int], offsets: Sequence[int]
) -> list[bytes]:
    """Return the replies of `encode_put_replies` as a list; 1 or more puts."""
    body_bytes = _put_body_bytes(partition, ids, offsets)
    if body_bytes:
        reply = _PUT_REPLY % (body_bytes, partition)
        return [reply % put for put in zip(opaques, ids, offsets, strict=True)]
    middle = len(opaques) // 2
    return encode_put_replies_apart(
        partition, opaques[:middle], ids[:middle], offsets[:middle]
    ) + encode_put_replies_apart(
        partition, opaques[middle:], ids[middle:], offsets[middle:]
    )


def _put_body_bytes(
    partition: int, ids: Sequence[int], offsets: Sequence[int]
) -> int | None:
    """Return the length of every reply's body; None if lengths differ."""
    id_bytes, offset_bytes = len(str(ids[0])), len(str(offsets[0]))
    if id_bytes != len(str(ids[-1])) or offset_bytes != len(str(offsets[-1])):
        return None
    return id_bytes + len(str(partition)) + offset_bytes + 2
