"""The floor of puts in a closed loop: a bare append and one sync for all that wait.

    python -m bench.floor.group FRAME_BYTES REPLY_BYTES RECORD_BYTES DATA_DIR

Any number of connections with one request of FRAME_BYTES each under way. Like the
broker it receives on one thread, and writes and syncs on another while the next group
fills; unlike the broker it looks at nothing. Prints its port.
"""

import os
import queue
import select
import socket
import sys
import threading
from pathlib import Path

RECV_BYTES = 1 << 18


def serve(frame_bytes: int, reply: bytes, record: bytes, directory: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=1000)
    print(listener.getsockname()[1], flush=True)
    fd = os.open(directory / "floor.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    work: queue.SimpleQueue[int] = queue.SimpleQueue()
    wake_r, wake_w = os.pipe()

    def write_and_sync() -> None:
        while count := work.get():
            os.write(fd, record * count)
            os.fdatasync(fd)
            os.write(wake_w, b"x")

    threading.Thread(target=write_and_sync, daemon=True).start()
    poller = select.epoll()
    for ready in (listener.fileno(), wake_r):
        poller.register(ready, select.EPOLLIN)
    socks: dict[int, socket.socket] = {}
    received: dict[int, int] = {}
    filling: list[socket.socket] = []
    syncing: list[socket.socket] = []
    while True:
        for ready, _ in poller.poll():
            if ready == wake_r:
                os.read(wake_r, 1)
                for sock in syncing:
                    sock.send(reply)
                syncing = []
            elif ready == listener.fileno():
                sock, _ = listener.accept()
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                socks[sock.fileno()], received[sock.fileno()] = sock, 0
                poller.register(sock.fileno(), select.EPOLLIN)
            else:
                data = socks[ready].recv(RECV_BYTES)
                received[ready] += len(data)
                if not data:
                    poller.unregister(ready)
                    socks.pop(ready).close()
                elif received[ready] >= frame_bytes:
                    received[ready] -= frame_bytes
                    filling.append(socks[ready])
        if filling and not syncing:
            syncing, filling = filling, []
            work.put(len(syncing))


if __name__ == "__main__":
    sys.setswitchinterval(0.0001)
    reply = b"result 200 ".ljust(int(sys.argv[2]), b"r")
    serve(int(sys.argv[1]), reply, b"r" * int(sys.argv[3]), Path(sys.argv[4]))
