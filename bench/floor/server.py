"""The floor of puts: receive, write, sync, reply; no parsing, checks or ids.

    python -m bench.floor.server PER_BLOCK REPLY_BYTES DATA_DIR BLOCK_BYTES...

It is given the sizes of the blocks of PER_BLOCK requests, which repeat, and replies to
each complete block. A reply begins like a broker's, so that counting replies is the
same work with both. Like the broker it receives on one thread, and writes and syncs on
another while the next group fills; unlike the broker it does not parse. Prints its
port.
"""

import itertools
import os
import queue
import select
import socket
import sys
import threading
from pathlib import Path

RECV_BYTES = 1 << 18


def serve(reply: bytes, directory: Path, sizes: list[int]) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=16)
    print(listener.getsockname()[1], flush=True)
    for number in itertools.count():
        sock, _ = listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Each connection has its own file, as each round of a broker has.
        path = directory / f"floor-{number}.log"
        fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        serve_one(sock, fd, reply, sizes)
        os.close(fd)


def serve_one(sock: socket.socket, fd: int, reply: bytes, sizes: list[int]) -> None:
    ends = itertools.accumulate(itertools.cycle(sizes))
    end = next(ends)
    work: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()
    wake_r, wake_w = os.pipe()

    def write_and_sync() -> None:
        while (chunks := work.get()) is not None:
            os.writev(fd, chunks) if len(chunks) < 1000 else os.write(
                fd, b"".join(chunks)
            )
            os.fdatasync(fd)
            os.write(wake_w, b"x")

    thread = threading.Thread(target=write_and_sync, daemon=True)
    thread.start()
    poller = select.epoll()
    poller.register(sock.fileno(), select.EPOLLIN)
    poller.register(wake_r, select.EPOLLIN)
    filling: list[bytes] = []
    received = syncing = 0
    is_busy = is_open = True
    is_busy = False
    while is_open:
        for ready, _ in poller.poll():
            if ready == wake_r:
                os.read(wake_r, 1)
                is_busy = False
                done = 0
                while end <= syncing:
                    done, end = done + 1, next(ends)
                sock.sendall(reply * done)
            else:
                data = sock.recv(RECV_BYTES)
                is_open = bool(data)
                filling.append(data)
                received += len(data)
        if filling and not is_busy and is_open:
            is_busy, syncing = True, received
            work.put(filling)
            filling = []
    work.put(None)
    thread.join()
    poller.close()
    os.close(wake_r)
    os.close(wake_w)
    sock.close()


if __name__ == "__main__":
    sys.setswitchinterval(0.0005)
    reply = b"result 200 ".ljust(int(sys.argv[2]), b"r") * int(sys.argv[1])
    serve(reply, Path(sys.argv[3]), [int(word) for word in sys.argv[4:]])
