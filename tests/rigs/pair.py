"""Two protocol connections back to back: what one says, the other hears."""

from metaq.protocol.commands import Command, Reply
from metaq.protocol.connection import NEED_DATA, Connection, Event, Role, WireLimits
from metaq.protocol.encoding import encode

DEFAULT_LIMITS = WireLimits()


def drain(connection: Connection) -> list[Event]:
    """Return every event that the received bytes hold, up to `NEED_DATA`."""
    events: list[Event] = []
    while (event := connection.next_event()) is not NEED_DATA:
        events.append(event)
    return events


class ConnectionPair:
    """A client and a server without a network between them."""

    def __init__(self, limits: WireLimits = DEFAULT_LIMITS) -> None:
        """Start both ends at the first byte."""
        self.client = Connection(Role.CLIENT, limits)
        self.server = Connection(Role.SERVER, limits)

    def ask(self, *commands: Command) -> list[Event]:
        """Send commands in one piece; return what the server hears."""
        self.server.receive_data(b"".join(map(encode, commands)))
        return drain(self.server)

    def answer(self, *replies: Reply) -> list[Event]:
        """Send replies in one piece; return what the client hears."""
        self.client.receive_data(b"".join(map(encode, replies)))
        return drain(self.client)
