"""Bytes in several pieces, processed in steps."""

from collections.abc import Generator, Iterable, Iterator
from typing import Final

from metaq.record.checksum import CHECKSUM_MASK, BytesLike, crc32

CHECKSUM_STEP_BYTES: Final = 1 << 20
"""Bytes of one checksum step: less than half a millisecond, after which another thread
may get the interpreter."""

BLOCK_BYTES: Final = 1 << 20
"""Size of joined blocks: most batches are one block. Each block costs the storage
thread a turn, and a wait for the interpreter when its checksum is computed."""


def in_steps(
    pieces: Iterable[BytesLike], step_bytes: int
) -> Iterator[list[memoryview]]:
    """Yield all bytes in order, `step_bytes` at a time, without copying.

    Args:
        pieces: any number, of any size; not changed.
        step_bytes: size of each step but the last, 1 or more.
    """
    step: list[memoryview] = []
    free_bytes = step_bytes
    for piece in pieces:
        view = memoryview(piece)
        while len(view) > free_bytes:
            yield [*step, view[:free_bytes]]
            view, step, free_bytes = view[free_bytes:], [], step_bytes
        step.append(view)
        free_bytes -= len(view)
    if step:
        yield step


def checksum_in_steps(pieces: Iterable[BytesLike]) -> Generator[None, None, int]:
    """Return the checksum of all bytes, in steps of CHECKSUM_STEP_BYTES."""
    crc = 0
    for number, step in enumerate(in_steps(pieces, CHECKSUM_STEP_BYTES)):
        if number:
            yield
        for piece in step:
            crc = crc32(piece, crc)
    return crc & CHECKSUM_MASK


def join_in_steps(
    pieces: Iterable[BytesLike], block_bytes: int = BLOCK_BYTES
) -> Generator[None, None, list[bytearray]]:
    """Return a copy of all bytes, in blocks of `block_bytes` except for the last."""
    blocks: list[bytearray] = []
    for step in in_steps(pieces, block_bytes):
        if blocks:
            yield
        blocks.append(bytearray().join(step))
    return blocks
