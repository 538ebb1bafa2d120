"""The floor of puts in a closed loop: an append and one sync for all waiting puts.

    python -m bench.floor.group REPLY_BYTES DATA_DIR

Serves any number of connections with one request under way each, which one `recv`
returns whole. Like the broker it receives on one thread, and writes and syncs on
another while the next group fills; unlike the broker it does not parse. Prints its
port.
"""

import os
import queue
import select
import socket
import sys
import threading
from pathlib import Path

RECV_BYTES = 1 << 18


def serve(reply: bytes, directory: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=1000)
    print(listener.getsockname()[1], flush=True)
    fd = os.open(directory / "floor.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    work: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
    wake_r, wake_w = os.pipe()

    def write_and_sync() -> None:
        while records := work.get():
            os.write(fd, b"".join(records))
            os.fdatasync(fd)
            os.write(wake_w, b"x")

    threading.Thread(target=write_and_sync, daemon=True).start()
    poller = select.epoll()
    for ready in (listener.fileno(), wake_r):
        poller.register(ready, select.EPOLLIN)
    socks: dict[int, socket.socket] = {}
    records: list[bytes] = []
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
                socks[sock.fileno()] = sock
                poller.register(sock.fileno(), select.EPOLLIN)
            else:
                data = socks[ready].recv(RECV_BYTES)
                if not data:
                    poller.unregister(ready)
                    socks.pop(ready).close()
                else:
                    records.append(data)
                    filling.append(socks[ready])
        if filling and not syncing:
            syncing, filling = filling, []
            work.put(records)
            records = []


if __name__ == "__main__":
    sys.setswitchinterval(0.0001)
    serve(b"result 200 ".ljust(int(sys.argv[1]), b"r"), Path(sys.argv[2]))
