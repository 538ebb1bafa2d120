"""The load: plain sockets that do as little as possible on their side of the wire.

The same loads run against the floor programs and the broker, so both numbers include
their cost. Requests are built before the clock starts; replies are counted, and any
other status than 200 ends the run.
"""

import os
import select
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

RECV_BYTES = 1 << 20
HEADER = struct.Struct(">iiqi")
TIMEOUT_S = 60.0


def connect(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def put_frame(
    topic: str,
    payload: bytes,
    opaque: int,
    partition: int = 0,
    *,
    checksum: int | str | None = None,
    key: str | None = None,
) -> bytes:
    """Return one put.

    Args:
        topic: topic of the put.
        payload: payload of the put.
        opaque: opaque, which becomes seven digits.
        partition: partition, or -1 for any.
        checksum: checksum; "" for a put of six words, None for the right one.
        key: key of its transaction; None: no transaction.
    """
    if checksum is None:
        checksum = zlib.crc32(payload) & 0x7FFFFFFF
    words = ["put", topic, partition, len(payload), 0, checksum, key or ""]
    head = " ".join(filter(None, map(str, words)))
    return f"{head} {1_000_000 + opaque}\r\n".encode() + payload


def mput_frame(
    topic: str, payload: bytes, count: int, opaque: int, partition: int = 0
) -> bytes:
    """Return one batch of `count` equal records."""
    return batch_frame(topic, [payload] * count, opaque, partition)


def batch_frame(
    topic: str,
    payloads: Sequence[bytes],
    opaque: int,
    partition: int = 0,
    *,
    key: str | None = None,
) -> bytes:
    """Return one batch, in the transaction `key` unless None."""
    made: dict[bytes, bytes] = {}
    for one in set(payloads):
        checksum = zlib.crc32(one) & 0x7FFFFFFF
        made[one] = HEADER.pack(len(one), checksum, 0, 0) + one
    records = b"".join(map(made.__getitem__, payloads))
    whole = zlib.crc32(records) & 0x7FFFFFFF
    head = f"mput {topic} {partition} {len(records)} {len(payloads)} {whole} - -1"
    words = f"{head} {key}" if key else head
    return f"{words} {1_000_000 + opaque}\r\n".encode() + records


@dataclass(frozen=True, slots=True)
class Blocks:
    """Prepared requests: `blocks` of `per_block` requests each."""

    blocks: list[bytes]
    per_block: int

    @property
    def count(self) -> int:
        return len(self.blocks) * self.per_block


def pipeline(
    port: int, load: Blocks, in_flight: int, count_replies: Callable[[bytes], int]
) -> float:
    """Send all blocks over a new connection; as `pipeline_over`."""
    with connect(port) as sock:
        return pipeline_over(sock, load, in_flight, count_replies)


def pipeline_over(
    sock: socket.socket,
    load: Blocks,
    in_flight: int,
    count_replies: Callable[[bytes], int],
) -> float:
    """Send all blocks with at most `in_flight` requests unanswered; return seconds.

    Args:
        sock: connection to the server.
        load: requests to send.
        in_flight: number of requests, a multiple of `load.per_block`.
        count_replies: returns the number of replies that begin in a piece of the
            stream; called with each piece in order.
    """
    room = threading.Semaphore(in_flight // load.per_block)

    def send() -> None:
        for block in load.blocks:
            room.acquire()
            sock.sendall(block)

    sender = threading.Thread(target=send, daemon=True)
    start = time.perf_counter()
    sender.start()
    replied = released = 0
    while replied < load.count:
        data = sock.recv(RECV_BYTES)
        if not data:
            raise RuntimeError(f"connection closed after {replied} replies")
        replied += count_replies(data)
        while replied - released >= load.per_block:
            room.release()
            released += load.per_block
    seconds = time.perf_counter() - start
    sender.join()
    return seconds


def ok_counter() -> Callable[[bytes], int]:
    """Return a counter of `result 200` replies; it raises on any other status."""
    mark, tail = b"result ", b""

    def count(data: bytes) -> int:
        nonlocal tail
        data = tail + data
        found = data.count(mark)
        if data.count(b"result 200 ") + 1 < found:
            raise RuntimeError(f"a put was refused: {data[:400]!r}")
        # Keep the start of a mark that the end of the piece may have split.
        tail = b""
        for size in range(len(mark) - 1, 0, -1):
            if data.endswith(mark[:size]):
                tail = mark[:size]
                break
        return found

    return count


def one_at_a_time(port: int, frames: Sequence[bytes], count: int) -> list[float]:
    """Send one request, wait for its reply, `count` times; return seconds of each."""
    sock = connect(port)
    samples = []
    for frame in islice(cycle(frames), count):
        start = time.perf_counter()
        sock.sendall(frame)
        reply = sock.recv(4096)
        samples.append(time.perf_counter() - start)
        if not reply.startswith(b"result 200 "):
            raise RuntimeError(f"a put was refused: {reply!r}")
    sock.close()
    return samples


def closed_loop(
    port: int, frames: Sequence[bytes], connections: int, count: int
) -> float:
    """Send `count` puts, one under way on each of many connections; return seconds."""
    opened = [connect(port) for _ in range(connections)]
    socks = {sock.fileno(): sock for sock in opened}
    poller = select.epoll()
    for fd in socks:
        poller.register(fd, select.EPOLLIN)
    following = cycle(frames)
    start = time.perf_counter()
    for sock in opened:
        sock.send(next(following))
    replied, sent = 0, connections
    while replied < count:
        for fd, _ in poller.poll():
            reply = socks[fd].recv(4096)
            if not reply.startswith(b"result 200 "):
                raise RuntimeError(f"a put was refused: {reply!r}")
            replied += 1
            if sent < count:
                socks[fd].send(next(following))
                sent += 1
    seconds = time.perf_counter() - start
    for sock in opened:
        sock.close()
    poller.close()
    return seconds


def write_and_sync(path: Path, size_bytes: int, count: int) -> list[float]:
    """Append `size_bytes` and sync, `count` times; return seconds of each."""
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    data = os.urandom(size_bytes)
    samples = []
    for _ in range(count):
        start = time.perf_counter()
        os.write(fd, data)
        os.fdatasync(fd)
        samples.append(time.perf_counter() - start)
    os.close(fd)
    return samples


def read_slices(
    port: int, request: Callable[[int], bytes], slice_bytes: int, count: int
) -> float:
    """Request `count` slices one at a time and discard them; return seconds.

    Each reply is a line with CRLF (or the floor's header of 24 bytes), followed by
    `slice_bytes` bytes.
    """
    sock = connect(port)
    buffer = bytearray(slice_bytes + 256)
    view = memoryview(buffer)
    start = time.perf_counter()
    for index in range(count):
        sock.sendall(request(index))
        got = sock.recv_into(view)
        if buffer.startswith(b"value "):
            size = int(buffer[6 : buffer.index(b" ", 6)])
            if size != slice_bytes:
                raise RuntimeError(f"slice of {size} bytes, expected {slice_bytes}")
            whole = buffer.index(b"\r\n") + 2 + slice_bytes
        elif buffer.startswith(b"h"):
            whole = 24 + slice_bytes
        else:
            raise RuntimeError(f"a get was refused: {bytes(buffer[:200])!r}")
        while got < whole:
            n = sock.recv_into(view[got:])
            if not n:
                raise RuntimeError("connection closed in a slice")
            got += n
    seconds = time.perf_counter() - start
    sock.close()
    return seconds
