"""Partition queue: waiting batches of one partition, and its broker's limits."""

from collections import deque
from typing import Protocol

from metaq.client.errors import MessageTooLargeError
from metaq.client.options import ProducerOptions
from metaq.client.produce.batches import Batch
from metaq.model import TopicPartition
from metaq.protocol.version import Capabilities
from metaq.record.layout import HEADER_BYTES, PAYLOAD_BYTES_MAX


class Announcer(Protocol):
    """A connection, as far as limits go."""

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities that the broker announced."""
        ...

    @property
    def is_open(self) -> bool:
        """Whether the broker is still the one that announced it; from any thread."""
        ...


class PartitionQueue:
    """The batches of one partition that wait for its sender.

    Owner: the accumulator, under its lock; the delivery reads `partition`.
    """

    __slots__ = (
        "announcer", "bytes_max", "count_max", "is_awake", "open", "partition",
        "payload_bytes_max", "sealed",
    )  # fmt: skip

    def __init__(self, partition: TopicPartition, options: ProducerOptions) -> None:
        self.partition = partition
        self.open: Batch | None = None
        self.sealed: deque[Batch] = deque()
        self.is_awake = False
        """The delivery will ask for its batches by itself."""
        self.bytes_max = options.batch_bytes_max
        """Largest batch, bytes, within the broker's announced limit."""
        self.count_max = options.batch_count_max
        """Most messages in a batch, likewise."""
        self.payload_bytes_max: int = PAYLOAD_BYTES_MAX
        """Largest payload that its broker takes, as far as it is known."""
        self.announcer: Announcer | None = None
        """Source of these limits; None: no broker has announced any."""

    def set_limits(self, options: ProducerOptions, announcer: Announcer) -> None:
        """Apply the limits that a broker announced, within the options."""
        capabilities = announcer.capabilities
        self.announcer = announcer
        self.payload_bytes_max = capabilities.payload_bytes_max or PAYLOAD_BYTES_MAX
        # A message over the payload limit is over this one too, so that no open
        # batch has room for it: see `check`.
        self.bytes_max = min(
            options.batch_bytes_max,
            capabilities.batch_bytes_max or options.batch_bytes_max,
            self.payload_bytes_max + HEADER_BYTES,
        )
        self.count_max = min(
            options.batch_count_max,
            capabilities.batch_records_max or options.batch_count_max,
        )

    def check(self, size_bytes: int, *, is_lasting: bool = False) -> None:
        """Refuse a message that the broker does not take.

        A broker that went away may announce more when it is back: limits of a lost
        connection refuse nothing. The delivery finds out with the message at hand.

        Args:
            size_bytes: of the record, header included.
            is_lasting: the message is to be kept until the broker is back: the last
                known limits count.

        Raises:
            MessageTooLargeError: its payload is over the limit.
        """
        payload_bytes = size_bytes - HEADER_BYTES
        if payload_bytes <= self.payload_bytes_max:
            return
        if is_lasting or (self.announcer is not None and self.announcer.is_open):
            raise MessageTooLargeError(
                f"message: {self.partition} takes at most {self.payload_bytes_max}"
                f" bytes, got {payload_bytes}"
            )
