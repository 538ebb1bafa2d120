"""A channel with the other end of its socket, and ranges that count their releases."""

import asyncio
import os
import socket
import tempfile
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from metaq.net.channel import LINGER_S, Channel
from metaq.testing.clock import ManualClock

ROOM = 1000


class Range:
    """A file range that counts its releases."""

    is_open = True

    def __init__(self, data: bytes, position: int = 0, size: int | None = None) -> None:
        self.reader = ThreadPoolExecutor(1)
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  # closed by release
        self._file.write(data)
        self._file.flush()
        self.position = position
        self.size_bytes = len(data) - position if size is None else size
        self.release_count = 0

    def open(self) -> None:
        self.is_open = True

    def fileno(self) -> int:
        assert self.is_open
        return self._file.fileno()

    def is_cached(self, position: int, size_bytes: int) -> bool:
        return os.fstat(self.fileno()).st_size >= position + size_bytes

    def warm(self, position: int, size_bytes: int) -> None:
        pass

    def release(self) -> None:
        self.release_count += 1
        self._file.close()
        self.reader.shutdown(wait=False)


class ColdRange(Range):
    """A range that the page cache has once it was warmed."""

    def __init__(self, data: bytes, position: int = 0, size: int | None = None) -> None:
        super().__init__(data, position, size)
        self.question_count = 0
        self.warmed: list[tuple[int, int]] = []
        """Position and size of the parts."""
        self.warmers: set[int] = set()
        """Threads that read them in."""

    def is_cached(self, position: int, size_bytes: int) -> bool:
        self.question_count += 1
        return bool(self.warmed)

    def warm(self, position: int, size_bytes: int) -> None:
        self.warmers.add(threading.get_ident())
        self.warmed.append((position, size_bytes))


def sorry(error: BaseException) -> bytes:
    return f"sorry: {error}".encode()


class Rig:
    """A channel, the other end of its socket, and what was called back."""

    def __init__(self, linger_s: float = LINGER_S) -> None:
        ours, self.peer = socket.socketpair()
        self.peer.settimeout(30)
        self.clock = ManualClock()
        self.channel = Channel(
            ours,
            loop=asyncio.get_running_loop(),
            clock=self.clock,
            room_bytes=ROOM,
            linger_s=linger_s,
        )
        self.received: list[bytes] = []
        self.events: list[str] = []
        self.lacking_bytes = 0
        self.channel.start(
            on_data=self.received.append,
            on_end=lambda: self.events.append("end"),
            on_room=lambda: self.events.append("room"),
            on_closed=lambda reason: self.events.append(f"closed: {reason}"),
            lacking=lambda: self.lacking_bytes,
        )

    async def read(self, size: int) -> bytes:
        """Read exactly `size` bytes at the other end, in a thread."""
        data = b""
        while len(data) < size:
            piece = await asyncio.to_thread(self.peer.recv, size - len(data))
            if not piece:
                break
            data += piece
        return data


def run(
    scenario: Callable[[Rig], Awaitable[None]], *, linger_s: float = LINGER_S
) -> None:
    async def main() -> None:
        rig = Rig(linger_s)
        try:
            await scenario(rig)
        finally:
            rig.channel.abort("test over")
            rig.peer.close()

    asyncio.run(main())
