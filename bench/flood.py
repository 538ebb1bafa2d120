"""Flood a broker over one connection with one form of command, until killed.

    python -m bench.flood PORT TOPIC FORM

Prints a line when the flood begins. Replies are read and discarded.
"""

import selectors
import socket
import sys
from collections.abc import Callable, Iterator
from itertools import count, repeat

from bench import load

BLOCK_BYTES = 1 << 20
POLLS = 100_000
POLL_WAIT_MS = 30_000
LARGE_BYTES = 1 << 20
BATCH_RECORDS = 60_000


def put(topic: str, size_bytes: int, checksum: int | None = None, to: int = 0) -> bytes:
    payload = b"y" * size_bytes
    if checksum is None:
        return load.put_frame(topic, payload, 1, to)
    return b"put %b %d %d 0 %d 1\r\n%b" % (
        topic.encode(), to, size_bytes, checksum, payload,
    )  # fmt: skip


FORMS: dict[str, Callable[[str], bytes]] = {
    "puts": lambda topic: put(topic, 128),
    "puts of 1 B": lambda topic: put(topic, 1),
    "puts without checksum": lambda topic: put(topic, 128, checksum=-1),
    "puts to partition -1": lambda topic: put(topic, 128, to=-1),
    "puts of 1 MiB": lambda topic: put(topic, LARGE_BYTES),
    "puts of 15 MiB": lambda topic: put(topic, 15 * LARGE_BYTES),
    "refused puts": lambda topic: put(topic, 8, checksum=5),
    "mput of 60,000": lambda topic: load.mput_frame(
        topic, b"y" * 128, BATCH_RECORDS, 1
    ),
    "gets": lambda topic: b"get %b g 0 0 65536 1\r\n" % topic.encode(),
    "offsets": lambda topic: b"offset %b g 0 0 1\r\n" % topic.encode(),
    "offset questions": lambda topic: (
        b"offset %b g 0 0 1 count=9223372036854775807\r\n" % topic.encode()
    ),
    "stats": lambda _topic: b"stats  1\r\n",
    "stats offsets": lambda _topic: b"stats offsets 1\r\n",
    "stats config": lambda _topic: b"stats config 1\r\n",
}
"""The repeated command of each form, given the topic."""

TRANSACTIONS = {"transactions of one put": 1, "transactions of 100 puts": 100}
"""Puts of 128 B per local transaction; begin, puts and commit are sent together."""

LONG_POLLS = "long polls"

ALL = (*FORMS, *TRANSACTIONS, LONG_POLLS)
"""All forms of a flood."""


def main() -> None:
    port, topic, form = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    sock = load.connect(port)
    sock.sendall(put(topic, 128))
    sock.recv(4096)
    if form == LONG_POLLS:
        poll(sock, topic)
        return
    if form in TRANSACTIONS:
        stream(sock, transactions(topic, TRANSACTIONS[form]))
        return
    frame = FORMS[form](topic)
    stream(sock, repeat(frame * max(1, BLOCK_BYTES // len(frame))))


def transactions(topic: str, put_count: int) -> Iterator[bytes]:
    """Yield blocks of whole transactions with different keys."""
    line, _, payload = put(topic, 128).partition(b"\r\n")
    words, _, opaque = line.rpartition(b" ")
    block: list[bytes] = []
    block_bytes = 0
    for number in count():
        key = b"TX:flood:%d" % number
        begin = b"transaction %b flood BEGIN 1\r\n" % key
        commit = b"transaction %b flood COMMIT_ONE_PHASE 1\r\n" % key
        frame = b"%b %b %b\r\n%b" % (words, key, opaque, payload)
        block += (begin, frame * put_count, commit)
        block_bytes += len(begin) + len(frame) * put_count + len(commit)
        if block_bytes >= BLOCK_BYTES:
            yield b"".join(block)
            block, block_bytes = [], 0


def stream(sock: socket.socket, blocks: Iterator[bytes]) -> None:
    """Send blocks, and discard the replies."""
    sock.setblocking(False)
    selector = selectors.DefaultSelector()
    selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE)
    unsent = memoryview(next(blocks))
    print("flooding", flush=True)
    while True:
        for _key, events in selector.select():
            if events & selectors.EVENT_READ and not sock.recv(load.RECV_BYTES):
                raise RuntimeError("the broker closed the flood")
            if events & selectors.EVENT_WRITE:
                unsent = unsent[sock.send(unsent) :] or memoryview(next(blocks))


def poll(sock: socket.socket, topic: str) -> None:
    """Repeatedly let many gets wait at the end of a partition, then put a message."""
    reply = b""
    print("flooding", flush=True)
    while True:
        sock.sendall(put(topic, 1, to=2))
        while not (reply := sock.recv(4096)).startswith(b"result 200"):
            pass
        end = int(reply.rsplit(b" ", 1)[1]) + 21
        get = b"get %b g 2 %d 65536 1 wait=%d\r\n" % (
            topic.encode(), end, POLL_WAIT_MS,
        )  # fmt: skip
        sock.sendall(get * POLLS + put(topic, 1, to=2))
        answered = 0
        while answered < POLLS + 1:
            data = sock.recv(load.RECV_BYTES)
            answered += data.count(b"result ") + data.count(b"value ")


if __name__ == "__main__":
    main()
