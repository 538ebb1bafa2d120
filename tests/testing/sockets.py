"""A blocking connection that shows what a peer sends, and how the talk ends."""

import socket
from typing import Self

from metaq.model import BrokerAddress
from metaq.protocol.commands import Command, Reply, Result, Value
from metaq.protocol.connection import NEED_DATA, Connection, Role, WireLimits
from metaq.protocol.encoding import encode

PATIENCE_S = 60.0


class Wire:
    """One end of a connection to a broker, for the thread of the test."""

    def __init__(self, address: BrokerAddress) -> None:
        self.socket = socket.create_connection(
            (address.host, address.port), timeout=PATIENCE_S
        )
        self.pieces: list[bytes] = []
        self._connection = Connection(Role.CLIENT, WireLimits())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.socket.close()

    def send(self, *commands: Command) -> None:
        self.socket.sendall(b"".join(map(encode, commands)))

    def reply(self) -> Reply:
        while (event := self._connection.next_event()) is NEED_DATA:
            self.pieces.append(self.socket.recv(65536))
            assert self.pieces[-1], "closed"
            self._connection.receive_data(self.pieces[-1])
        assert isinstance(event, Result | Value)
        return event

    def ask(self, command: Command) -> Reply:
        self.send(command)
        return self.reply()

    def is_ended(self) -> bool:
        """Wait for the peer to say or do something; tell whether it closed."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionError:
            return True
