"""Records of one length, written column by column.

    header header header ...        stride = 20 + length
    ^   ^                           one strided assignment per byte of a field
    |   +-- payload

Many messages are as long as their neighbours. Their records are made in a fixed number
of steps for each BLOCK_COUNT of them: one join with the header between the payloads,
then one strided assignment for each byte of the fields that differ. No interpreted
instruction runs per record, and a block stays in the cache of the core from its first
step to its last; together that is a quarter of the cost of packing each header.

Source: broker spec 1.14.
"""

from collections.abc import Sequence
from typing import Final

from metaq.model import MessageId
from metaq.record.ids import id_runs
from metaq.record.layout import CHECKSUM_AT, HEADER, HEADER_BYTES, ID_AT

BLOCK_COUNT: Final = 256
"""Records that are made together: 40 KB of small ones."""

_HIGH_ID_BYTES: Final = 7
_LOW_OCTETS: Final = bytes(range(256))


def encode_uniform(
    payloads: Sequence[bytes], checksums: bytes, *, flag: int = 0
) -> bytearray:
    """Return records of one length, one behind the other, each with the id 0.

    Args:
        payloads: at least one; all of one length.
        checksums: `pack_checksums(payloads)`.
        flag: signed 32-bit flag word of all of them.
    """
    length = len(payloads[0])
    header = HEADER.pack(length, 0, 0, flag)
    records = bytearray()
    for first in range(0, len(payloads), BLOCK_COUNT):
        end = first + BLOCK_COUNT
        checksum_at = len(records) + CHECKSUM_AT
        records += header
        records += header.join(payloads[first:end])
        for octet in range(4):
            records[checksum_at + octet :: HEADER_BYTES + length] = checksums[
                4 * first + octet : 4 * end : 4
            ]
    return records


def stamp_ids(records: bytearray, stride: int, first_id: MessageId, count: int) -> None:
    """Write the ids of records of one length into them.

    Args:
        records: changed in place; `count * stride` bytes.
        stride: size of a record, header included.
        first_id: of the first record; the k-th gets `id_after(first_id, k)`.
        count: records.
    """
    id_at = ID_AT
    for run in id_runs(first_id, count):
        first = run.start
        while first < run.stop:
            # Ids that differ in their last byte only.
            low = first & 0xFF
            step = min(256 - low, run.stop - first)
            octets = first.to_bytes(8, signed=True)
            end = id_at + step * stride
            for octet in range(_HIGH_ID_BYTES):
                high = octets[octet : octet + 1]
                records[id_at + octet : end : stride] = high * step
            records[id_at + _HIGH_ID_BYTES : end : stride] = _LOW_OCTETS[
                low : low + step
            ]
            id_at, first = end, first + step
