"""The floor of gets: for each request, a header and a sendfile of one slice.

    python -m bench.floor.gets REQUEST_BYTES HEADER_BYTES SLICE_BYTES FILE

Each REQUEST_BYTES received are one request. Prints its port.
"""

import os
import socket
import sys


def serve(request_bytes: int, header: bytes, slice_bytes: int, path: str) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=16)
    print(listener.getsockname()[1], flush=True)
    fd = os.open(path, os.O_RDONLY)
    end = os.fstat(fd).st_size - slice_bytes
    while True:
        sock, _ = listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        position = received = served = 0
        while data := sock.recv(1 << 16):
            received += len(data)
            while served < received // request_bytes:
                sock.send(header, socket.MSG_MORE)
                sent = 0
                while sent < slice_bytes:
                    sent += os.sendfile(
                        sock.fileno(), fd, position + sent, slice_bytes - sent
                    )
                position = (position + slice_bytes) % max(1, end)
                served += 1
        sock.close()


if __name__ == "__main__":
    serve(int(sys.argv[1]), b"h" * int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
