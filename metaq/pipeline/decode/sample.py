"""Some messages of a topic, to propose a schema from."""

from collections.abc import Sequence
from contextlib import closing
from itertools import islice
from typing import Final

from metaq.client import Client, Start

SAMPLE_BYTES_MAX: Final = 16 * 1024 * 1024
"""Bytes of the messages that are looked at, exceeded by less than one of them."""


def read_sample(
    client: Client, topic: str, partitions: Sequence[str], *, count: int, start: Start
) -> list[bytes]:
    """Return the data of some messages of a topic, as many of each partition.

    Args:
        client: of its cluster.
        topic: its name.
        partitions: names of those that are read.
        count: most messages; `SAMPLE_BYTES_MAX` bounds their bytes.
        start: the first of them.
    """
    values: list[bytes] = []
    size_bytes = 0
    for number, partition in enumerate(partitions):
        # What a partition lacks, later ones may have.
        share = -(-(count - len(values)) // (len(partitions) - number))
        messages = client.browse(
            topic, partitions=[partition], start=start, stop_at_end=True
        )
        with closing(messages):
            for message in islice(messages, share):
                values.append(message.data)
                size_bytes += len(message.data)
                if size_bytes >= SAMPLE_BYTES_MAX:
                    return values
    return values
