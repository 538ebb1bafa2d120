"""Two protocol connections that are connected to each other."""

from metaq.protocol.commands import Command, Reply
from metaq.protocol.connection import NEED_DATA, Connection, Event, Role, WireLimits
from metaq.protocol.encoding import encode

DEFAULT_LIMITS = WireLimits()


def drain(connection: Connection) -> list[Event]:
    """Return all events in the received bytes, up to `NEED_DATA`."""
    events: list[Event] = []
    while (event := connection.next_event()) is not NEED_DATA:
        events.append(event)
    return events


class ConnectionPair:
    """A client and a server connection, without a network."""

    def __init__(self, limits: WireLimits = DEFAULT_LIMITS) -> None:
        """Create both ends."""
        self.client = Connection(Role.CLIENT, limits)
        self.server = Connection(Role.SERVER, limits)

    def ask(self, *commands: Command) -> list[Event]:
        """Send commands in one piece; return the server's events."""
        self.server.receive_data(b"".join(map(encode, commands)))
        return drain(self.server)

    def answer(self, *replies: Reply) -> list[Event]:
        """Send replies in one piece; return the client's events."""
        self.client.receive_data(b"".join(map(encode, replies)))
        return drain(self.client)
