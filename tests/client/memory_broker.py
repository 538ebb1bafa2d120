"""A broker in memory, on a real socket, that takes batches and fails on cue."""

import contextlib
import socket
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Self

from metaq.model import BrokerAddress, MessageId
from metaq.protocol.commands import Mput, Put, Result, Stats, Version
from metaq.protocol.connection import NEED_DATA, Connection, Role, WireLimits
from metaq.protocol.encoding import encode
from metaq.protocol.version import Capabilities, encode_version_body
from metaq.record.layout import HEADER, HEADER_BYTES, encode_record

OURS = Capabilities(
    "test",
    has_mput=True,
    wait_ms_max=1000,
    payload_bytes_max=1 << 20,
    batch_bytes_max=1 << 20,
    batch_records_max=100,
)
JAVA = Capabilities("1.4.6.3-SNAPSHOT")


class MemoryBroker:
    """Takes puts and tells its partitions; one thread per connection."""

    def __init__(self, capabilities: Capabilities = OURS, partitions: int = 2) -> None:
        self.capabilities = capabilities
        self.partition_count = partitions
        self.logs: dict[tuple[str, int], bytearray] = defaultdict(bytearray)
        self.next_id = 1_000_000
        self.commands: list[object] = []
        self.connection_count = 0
        self.refuse: Callable[[object], Result | None] = lambda _command: None
        self.hang_up: Callable[[object], bool] = lambda _command: False
        self.stay_silent: Callable[[object], bool] = lambda _command: False
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.address = BrokerAddress("127.0.0.1", self.port)
        self._spawn(self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_args: object) -> None:
        self.stop_listening()
        self.drop_connections()
        for thread in self._threads:
            thread.join(30)
        for sock in self._open:
            sock.close()

    def stop_listening(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def drop_connections(self) -> None:
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def payloads(self, topic: str, partition: int) -> list[bytes]:
        found, position = [], 0
        data = self.logs[topic, partition]
        while position < len(data):
            (length, *_rest) = HEADER.unpack_from(data, position)
            position += HEADER_BYTES
            found.append(bytes(data[position : position + length]))
            position += length
        return found

    # -- inside -----------------------------------------------------------------------

    def _spawn(self, work: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _peer = self._listener.accept()
            except OSError:
                return
            self.connection_count += 1
            self._open.append(sock)
            self._spawn(self._serve, sock)

    def _serve(self, sock: socket.socket) -> None:
        connection = Connection(Role.SERVER, WireLimits())
        try:
            while data := sock.recv(65536):
                connection.receive_data(data)
                while (command := connection.next_event()) is not NEED_DATA:
                    self.commands.append(command)
                    if self.hang_up(command):
                        sock.shutdown(socket.SHUT_RDWR)
                        return
                    if self.stay_silent(command):
                        continue
                    reply = self.refuse(command) or self._answer(command)
                    sock.sendall(encode(reply))
        except OSError:
            return

    def _answer(self, command: object) -> Result:
        with self._lock:
            match command:
                case Version():
                    body = encode_version_body(self.capabilities)
                    if self.capabilities is JAVA:
                        body = JAVA.version
                    return Result(200, body.encode(), command.opaque)
                case Put():
                    record = encode_record(
                        command.payload,
                        id=MessageId(self.next_id),
                        flag=command.flag,
                    )
                    return self._store(command, record, 1)
                case Mput():
                    return self._store(command, command.payload, command.count)
                case Stats():
                    return Result(200, self._stats(command.item), command.opaque)
        raise AssertionError(command)

    def _store(self, command: Put | Mput, data: bytes, count: int) -> Result:
        log = self.logs[command.topic, command.partition]
        body = f"{self.next_id} {command.partition} {len(log)}"
        log += data
        self.next_id += count
        return Result(200, body.encode(), command.opaque)

    def _stats(self, item: str) -> bytes:
        if item == "config":
            return b"not a configuration"
        lines = ["STATS"]
        if not item:
            lines += ["pid 1", "broker_id 7"]
        elif item == "topics":
            lines += ["t partitions 2 message_count 1", "wild-* *Empty*"]
        elif item == "offsets":
            logs = [f"t part {n}" for n in range(self.partition_count)]
            lines += [f"{log} min_offset 0 max_offset 0" for log in logs]
        return ("\r\n".join([*lines, "END"]) + "\r\n").encode()
