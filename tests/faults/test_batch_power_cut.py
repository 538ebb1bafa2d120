"""After a power cut, with anything kept, a receipt that is remembered is true."""

import random

import pytest

from tests.rigs.fs import FaultyFileSystem, crash_points, keep_all, keep_random
from tests.sampling import quarter
from tests.storage.support import content_of, log_of, opened
from tests.storage.test_partition_log_batches import send

SEGMENT = 120
SAMPLES = 12


def live(fs: FaultyFileSystem) -> None:
    """Batches of two producers over rolls, a clean stop, a second start, a kill."""
    for start in (0, 30):
        bench = opened(fs, is_late=True, segment_bytes_max=SEGMENT)
        for number in range(start, start + 24, 6):
            send(bench, number, 3, "a")
            send(bench, number + 3, 2, "b")
            bench.run()
        if not start:
            bench.close()


@pytest.mark.slow
def test_what_is_remembered_lies_where_the_receipt_says(
    seed: int, rng: random.Random
) -> None:
    """With the id that it says; what is not remembered may be there or not."""
    fs, remembered = FaultyFileSystem(), 0
    points = crash_points(fs, lambda: live(fs), lambda: None)
    for number, point in quarter([*enumerate(points)], rng):
        for choose in (
            keep_all,
            *(keep_random(seed + number * 1000 + i) for i in range(SAMPLES)),
        ):
            bench = opened(
                point.disk.crash(choose), is_late=True, segment_bytes_max=SEGMENT
            )
            log = log_of(bench)
            data = content_of(log)
            for batch in log.producers:
                numbers = range(batch.sequence, batch.next_sequence)
                records = [
                    data[at : at + 20 + len(b"%d" % n)]
                    for n, at in zip(numbers, offsets(batch), strict=True)
                ]
                assert [int(record[20:]) for record in records] == list(numbers)
                first_id = int.from_bytes(records[0][8:16], "big")
                assert first_id == batch.first_id
                remembered += 1
            bench.close()
    assert remembered > 10 * SAMPLES


def offsets(batch) -> list[int]:
    """Return where the records of a batch of `send` lie."""
    found, at = [], batch.offset
    for number in range(batch.sequence, batch.next_sequence):
        found.append(at)
        at += 20 + len(b"%d" % number)
    assert at == batch.end_offset
    return found
