"""Interfaces of connections, and of their pool, as the producer uses them."""

from collections.abc import Callable
from typing import Protocol

from metaq.errors import MetaqError, RemoteProtocolError
from metaq.model import BrokerAddress
from metaq.peer.connection import PutListener
from metaq.protocol.commands import Command, Reply
from metaq.protocol.version import Capabilities


class PutConnection(Protocol):
    """Connection interface used by the delivery; `BrokerConnection` is one."""

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities that the broker announced."""
        ...

    @property
    def is_open(self) -> bool:
        """Whether the broker is still the one that announced them; from any thread."""
        ...

    @property
    def has_room(self) -> bool:
        """Whether one more request keeps the bound on requests in flight."""
        ...

    def next_opaque(self) -> int:
        """Return a number that no request in flight has."""
        ...

    def submit(
        self,
        frame: bytes,
        opaque: int,
        on_reply: Callable[[Reply | MetaqError], None],
        *,
        deadline_s: float,
        is_alone: bool = False,
    ) -> None:
        """Send a request; see `BrokerConnection.submit`."""
        ...

    def next_opaques(self, count: int) -> range:
        """Return numbers that no request in flight has."""
        ...

    def submit_puts(
        self, frames: bytes, opaques: range, listener: PutListener, *, deadline_s: float
    ) -> None:
        """Send a run of puts; see `BrokerConnection.submit_puts`."""
        ...

    async def call(self, command: Command, *, deadline_s: float) -> Reply:
        """Send a command and return its reply; see `BrokerConnection.call`."""
        ...

    def close_for(self, error: RemoteProtocolError) -> None:
        """Close because the broker broke the rules."""
        ...


class Pool(Protocol):
    """Pool interface used by the delivery; `ConnectionPool` is one."""

    def ready(self, address: BrokerAddress) -> PutConnection | None:
        """Return the open connection to an address, if there is one."""
        ...

    async def get(self, address: BrokerAddress, *, deadline_s: float) -> PutConnection:
        """Return a connection; NoBrokerError at the deadline."""
        ...

    def when_open(
        self,
        address: BrokerAddress,
        on_end: Callable[[MetaqError | None], None],
        *,
        deadline_s: float,
    ) -> Callable[[], None]:
        """Call back when there is a connection; see `ConnectionPool.when_open`."""
        ...
