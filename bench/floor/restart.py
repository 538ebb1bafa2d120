"""The floor of a restart: an interpreter that reads a file and computes a checksum.

python -m bench.floor.restart FILE
"""

import os
import sys
import zlib

CHUNK_BYTES = 1 << 22


def main(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    buffer = bytearray(CHUNK_BYTES)
    position = crc = 0
    while n := os.preadv(fd, [buffer], position):
        crc = zlib.crc32(memoryview(buffer)[:n], crc)
        position += n
    print(crc)


if __name__ == "__main__":
    main(sys.argv[1])
