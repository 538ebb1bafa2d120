"""Send messages at a steady rate, each with its send time.

    python -m bench.paced PORT TOPIC RATE COUNT FILE

A message is the send time in 20 digits, then a line of the file from its 21st byte on.
The clock is the machine's monotonic one, which all processes share.
"""

import sys
import time
from itertools import cycle
from pathlib import Path

from metaq.client import Client

TICK_S = 0.001


def main() -> None:
    port, topic, rate, count = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:5])
    lines = cycle(line[20:] for line in Path(sys.argv[5]).read_bytes().split(b"\n"))
    with (
        Client(brokers=[f"127.0.0.1:{port}"]) as client,
        client.producer() as producer,
    ):
        producer.send(topic, b"%020d" % 0)  # connected, topic known
        begin = time.monotonic()
        sent = 0
        while sent < count:
            due = min(int((time.monotonic() - begin) * rate) + 1, count)
            while sent < due:
                stamp = b"%020d" % time.monotonic_ns()
                producer.send_nowait(topic, stamp + next(lines))
                sent += 1
            time.sleep(TICK_S / 5)
        producer.flush(timeout=30)


if __name__ == "__main__":
    main()
