"""A broker in memory, on a real socket, that misbehaves on request."""

import contextlib
import socket
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Self

from metaq.model import MessageId
from metaq.protocol.commands import (
    Get,
    Mput,
    OffsetQuery,
    Put,
    Result,
    Stats,
    Value,
    Version,
)
from metaq.protocol.connection import NEED_DATA, Connection, Role, WireLimits
from metaq.protocol.encode import encode
from metaq.protocol.version import Capabilities, encode_version_body
from metaq.record.ids import EPOCH_MS, MS_SHIFT
from metaq.record.layout import HEADER, HEADER_BYTES, encode_record
from metaq.zk.znodes import BrokerAddress

OURS = Capabilities(
    "test",
    has_mput=True,
    wait_ms_max=1000,
    payload_bytes_max=1 << 20,
    batch_bytes_max=1 << 20,
    batch_records_max=100,
)
JAVA = Capabilities("1.4.6.3-SNAPSHOT")


def id_at(wall_ms: int, sequence: int = 0) -> MessageId:
    return MessageId(((wall_ms - EPOCH_MS) << MS_SHIFT) | sequence)


class MemoryBroker:
    """Segments of bytes per (topic, partition); one thread per connection."""

    def __init__(self, capabilities: Capabilities = OURS, partitions: int = 2) -> None:
        self.capabilities = capabilities
        self.partition_count = partitions
        self.segments: dict[tuple[str, int], list[bytearray]] = defaultdict(
            lambda: [bytearray()]
        )
        self.starts: dict[tuple[str, int], int] = defaultdict(int)
        self.transfer_max = 1 << 20
        self.next_id = 1_000_000
        self.config = b"not a configuration"
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
            thread.join(5)
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

    def append(self, topic: str, partition: int, data: bytes) -> None:
        self.segments[topic, partition][-1] += data

    def add(
        self,
        payload: bytes,
        *,
        topic: str = "t",
        partition: int = 0,
        message_id: int = 1,
    ) -> int:
        """Append one record; return its offset."""
        offset = self.end(topic, partition)
        self.append(topic, partition, encode_record(payload, id=MessageId(message_id)))
        return offset

    def roll(self, topic: str = "t", partition: int = 0) -> None:
        self.segments[topic, partition].append(bytearray())

    def end(self, topic: str, partition: int) -> int:
        segments = self.segments[topic, partition]
        return self.starts[topic, partition] + sum(map(len, segments))

    def payloads(self, topic: str, partition: int) -> list[bytes]:
        found, position = [], 0
        data = b"".join(self.segments[topic, partition])
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

    def _answer(self, command: object) -> Result | Value:
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
                case Get():
                    return self._get(command)
                case OffsetQuery():
                    return self._offset(command)
                case Stats():
                    return Result(200, self._stats(command.item), command.opaque)
        raise AssertionError(command)

    def _store(self, command: Put | Mput, data: bytes, count: int) -> Result:
        offset = self.end(command.topic, command.partition)
        self.append(command.topic, command.partition, data)
        body = f"{self.next_id} {command.partition} {offset}"
        self.next_id += count
        return Result(200, body.encode(), command.opaque)

    def _get(self, command: Get) -> Result | Value:
        key = (command.topic, command.partition)
        if key not in self.segments:
            return Result(404, b"The topic is not exists", command.opaque)
        start = self.starts[key]
        if command.offset < start:
            return Result(301, b"%d" % start, command.opaque)
        for segment in self.segments[key]:
            if start <= command.offset < start + len(segment):
                at = command.offset - start
                size = min(self.transfer_max, command.max_size)
                return Value(bytes(segment[at : at + size]), command.opaque)
            start += len(segment)
        return Result(404, b"Could not find message at position", command.opaque)

    def _offset(self, command: OffsetQuery) -> Result:
        key = (command.topic, command.partition)
        if key not in self.segments:
            return Result(404, b"The topic is not exists", command.opaque)
        start = self.starts[key]
        nearest = start
        for segment in self.segments[key]:
            if command.offset >= start:
                nearest = start
            start += len(segment)
        if command.offset >= start:
            nearest = start
        return Result(200, b"%d" % nearest, command.opaque)

    def _stats(self, item: str) -> bytes:
        if item == "config":
            return self.config
        lines = ["STATS"]
        if not item:
            lines += ["pid 1", "broker_id 7"]
        elif item == "topics":
            lines += ["t partitions 2 message_count 1", "wild-* *Empty*"]
        elif item == "offsets":
            logs = [f"t part {n}" for n in range(self.partition_count)]
            lines += [f"{log} min_offset 0 max_offset 0" for log in logs]
        return ("\r\n".join([*lines, "END"]) + "\r\n").encode()
