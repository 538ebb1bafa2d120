"""One partition of an ordered producer: its spool, its turn, and what is wrong."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from metaq.client.refused import RefusedMessages
from metaq.client.spool import Spool
from metaq.errors import MetaqError
from metaq.model import TopicPartition


@dataclass(slots=True)
class OrderedLane:
    """One partition. Owner: the ordered producer, on its loop."""

    partition: TopicPartition
    spool: Spool
    refused: RefusedMessages
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    replay: asyncio.Task[None] | None = None
    spooling: asyncio.Future[int] | None = None
    """What the disk has in hand; it may outlive a `send` that was cancelled."""
    settled: list[int] = field(default_factory=list)
    """Numbers of messages that are stored or set aside, and still in the spool."""
    last_error: MetaqError | None = None

    @property
    def name(self) -> str:
        """The partition as `<broker>-<partition>`."""
        return f"{self.partition.broker_id}-{self.partition.partition}"

    def problems(self) -> Iterator[str]:
        """Yield a sentence for what waits, and one for what was set aside."""
        if len(self.spool):
            yield f"{self.partition}: {self.last_error or 'its broker is away'}"
        if self.refused.count:
            yield (
                f"{self.partition}: {self.refused.count} spooled messages that are too"
                f" large were set aside, to {self.refused.directory}"
            )
