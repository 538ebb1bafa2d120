"""A broker process whose links, wall clock and disk are changed by a test.

    python -m tests.cluster.handled orders.json broker --config server.ini

The product runs as it is; what is below it is replaced: the port it listens at, the
addresses it connects to, `SystemClock.wall_ms`, and the system calls of its disk. The
orders are read again while it runs.
"""

import errno
import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from metaq.clock import SystemClock
from metaq.fs.calls import LinuxCalls
from metaq.fs.file_system import SystemFileSystem
from metaq.model import BrokerAddress, Millis
from metaq.net.listener import Listener
from metaq.peer.connection import BrokerConnection
from metaq.replication import follow_task

POLL_S: Final = 0.02
"""Orders are looked at so often."""


@dataclass
class Orders:
    """Faults of the process."""

    listen_port: int = 0
    """Listens here, and advertises `serverPort`, where a proxy is; 0: as it is."""
    peer_ports: dict[str, int] = field(default_factory=dict)
    """Advertised port of another replica → port of the proxy on the way to it."""
    clock_ms: int = 0
    """Added to the wall clock."""
    disk: str = ""
    """"": it is the product's. Else one that `works`; that `hangs`: syncs do not
    return; that is `full`: writes fail, and no byte is free."""

    def write(self, path: Path) -> None:
        """Give the orders; a process that reads them sees all of them or none."""
        new = path.with_suffix(".new")
        new.write_text(json.dumps(asdict(self)))
        new.replace(path)


class _Obeyed:
    """The orders as they are now, for what is replaced."""

    def __init__(self, path: Path) -> None:
        self.now = self._read(path)
        reader = threading.Thread(target=self._follow, args=(path,), daemon=True)
        reader.start()

    @staticmethod
    def _read(path: Path) -> Orders:
        return Orders(**json.loads(path.read_text()))

    def _follow(self, path: Path) -> None:
        while True:
            time.sleep(POLL_S)
            self.now = self._read(path)

    def sync(self, fd: int, /) -> None:
        """Sync, when the disk does."""
        while self.now.disk == "hangs":
            time.sleep(POLL_S)
        os.fdatasync(fd)

    def refuse_if_full(self) -> None:
        """Fail as a write does for which no byte is left."""
        if self.now.disk == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _replace_links(obeyed: _Obeyed) -> None:
    listen, connect = Listener.open, follow_task.open_connection

    def open_listener(self: Listener, host: str, port: int) -> int:
        listen(self, host, obeyed.now.listen_port or port)
        return port

    async def open_link(address: BrokerAddress, **options: Any) -> BrokerConnection:
        port = obeyed.now.peer_ports.get(str(address.port), address.port)
        return await connect(BrokerAddress(address.host, port), **options)

    Listener.open = open_listener  # type: ignore[method-assign]
    follow_task.open_connection = open_link  # type: ignore[assignment]


def _replace_clock(obeyed: _Obeyed) -> None:
    wall_ms = SystemClock.wall_ms

    def jumped_ms(self: SystemClock) -> Millis:
        return Millis(wall_ms(self) + obeyed.now.clock_ms)

    SystemClock.wall_ms = jumped_ms  # type: ignore[method-assign]


def _replace_disk(obeyed: _Obeyed) -> None:
    def writev(fd: int, buffers: Any, /) -> int:
        obeyed.refuse_if_full()
        return os.writev(fd, buffers)

    def pwrite(fd: int, data: Any, position: int, /) -> int:
        obeyed.refuse_if_full()
        return os.pwrite(fd, data, position)

    def statvfs(path: Path, /) -> os.statvfs_result:
        real = os.statvfs(path)
        if obeyed.now.disk != "full":
            return real
        fields = list(real)
        fields[4] = 0  # f_bavail
        return os.statvfs_result(fields)

    calls: Any = LinuxCalls
    calls.fdatasync = calls.fsync = staticmethod(obeyed.sync)
    calls.writev, calls.pwrite = staticmethod(writev), staticmethod(pwrite)
    calls.statvfs = staticmethod(statvfs)
    # A sync by the kernel cannot be held up.
    SystemFileSystem.open_syncs = lambda _self: None  # type: ignore[method-assign]


def main() -> None:
    """Run the command line with the orders of a file."""
    obeyed = _Obeyed(Path(sys.argv.pop(1)))
    _replace_links(obeyed)
    _replace_clock(obeyed)
    if obeyed.now.disk:
        _replace_disk(obeyed)
    from metaq.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
