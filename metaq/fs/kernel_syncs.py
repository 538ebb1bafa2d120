"""Syncs that the kernel carries out in the background.

Theory of operation. `fdatasync` blocks its thread until the disk has answered, so an
event loop needs another thread for it. That thread is woken, waits for the interpreter,
waits for the disk, waits for the interpreter again and wakes the loop. For one small
group these switches take as long as a fast disk. With the asynchronous I/O of Linux
(io_submit(2)) a kernel thread waits instead, and an eventfd becomes readable when the
sync is done.

The kernel makes the same call there (`vfs_fsync` of the same open file): the sync
covers all earlier writes, and fails once for bytes that could not be written.

    control block, `struct iocb`, 64 bytes, in the byte order of the machine
    byte  0      8          16       18        20   24       56      60
          +------+----------+--------+---------+----+--------+-------+---------+
          | data | 0        | opcode | 0       | fd | 0      | flags | eventfd |
          | u64  | 2 of u32 | u16    | u16     | u32| 4 of u64| u32  | u32     |
          +------+----------+--------+---------+----+--------+-------+---------+
    event, `struct io_event`, 32 bytes
    byte  0      8               16       24
          +------+---------------+--------+-----+
          | data | control block | result | 0   |
          | u64  | u64           | i64    | i64 |
          +------+---------------+--------+-----+

`data` is the number of the sync; a negative result is minus the error number.
"""

import ctypes
import os
import platform
from collections.abc import Callable, Iterator
from struct import Struct
from typing import Final, Protocol

SYNCS_MAX: Final = 64
"""Maximum number of outstanding syncs; more are refused."""

CALLS: Final = {
    ("x86_64", 8): (206, 208, 209),
    ("aarch64", 8): (0, 4, 2),
    ("riscv64", 8): (0, 4, 2),
}
"""Machine and pointer size in bytes → numbers of io_setup, io_getevents and io_submit.
In a 32-bit process on the same machine 206 is setgroups and 2 is fork."""

_free_queues: list[int] = []
"""Unused queues, kept until the process ends, because io_destroy takes 30 ms and waits
for a hanging disk."""

os.register_at_fork(after_in_child=_free_queues.clear)  # a child inherits no queues

_BLOCK: Final = Struct("=Q8xH2xI32xII")
EVENT: Final = Struct("=QQqq")
"""Data, control block, result, zero."""
_FDSYNC: Final = 3
_TELLSEVENTFD: Final = 1


def decode_events(
    events: ctypes.Array[ctypes.c_char] | bytes, count: int
) -> Iterator[tuple[int, int]]:
    """Yield the number of each completed sync, and 0 or its error number."""
    for position in range(0, count * EVENT.size, EVENT.size):
        done, _, result, _ = EVENT.unpack_from(events, position)
        yield done, max(0, -result)


class Syncs(Protocol):
    """Asynchronous syncs: by the kernel, or simulated in tests."""

    def begin(self, fd: int, on_done: Callable[[int], None]) -> bool:
        """Begin to sync a file, which may be closed before the sync is done.

        `on_done` is called later, on this thread, with 0 or the error number; it must
        not raise. False: the sync was not begun, and `on_done` is never called.
        """


class KernelSyncs:
    """Syncs by the kernel, for one thread, whose loop watches `fileno`."""

    def __init__(self) -> None:
        """Request a queue from the kernel; raises `OSError` if there is none."""
        machine, word_bytes = platform.machine(), ctypes.sizeof(ctypes.c_void_p)
        calls = CALLS.get((machine, word_bytes))
        if calls is None or not hasattr(os, "eventfd"):
            raise OSError(f"no asynchronous syncs on {machine}, {8 * word_bytes} bits")
        setup, self._get, self._submit = calls
        # None of the calls blocks, so the interpreter lock is kept (`PyDLL`).
        self._libc = ctypes.PyDLL(None, use_errno=True).syscall
        self._libc.argtypes, self._libc.restype = (ctypes.c_long,) * 6, ctypes.c_long
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            self._queue = _free_queues.pop()
        except IndexError:
            queue = ctypes.c_ulong(0)
            try:
                self._call(setup, SYNCS_MAX, ctypes.addressof(queue))
            except OSError:
                os.close(self._eventfd)
                raise
            self._queue = queue.value
        self._block = ctypes.create_string_buffer(_BLOCK.size)
        self._blocks = (ctypes.c_void_p * 1)(ctypes.addressof(self._block))
        self._blocks_at = ctypes.addressof(self._blocks)
        self._events = ctypes.create_string_buffer(EVENT.size * SYNCS_MAX)
        self._events_at = ctypes.addressof(self._events)
        self._waiting: dict[int, Callable[[int], None]] = {}
        self._number = 0

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when a sync is done."""
        return self._eventfd

    @property
    def is_idle(self) -> bool:
        """Whether no sync is outstanding."""
        return not self._waiting

    def begin(self, fd: int, on_done: Callable[[int], None]) -> bool:
        """Begin to sync a file; see `Syncs.begin`."""
        if len(self._waiting) >= SYNCS_MAX:
            return False
        self._number += 1
        _BLOCK.pack_into(
            self._block, 0, self._number, _FDSYNC, fd, _TELLSEVENTFD, self._eventfd
        )
        try:
            self._call(self._submit, self._queue, 1, self._blocks_at)
        except OSError:
            return False  # the caller's `fdatasync` reports the reason
        self._waiting[self._number] = on_done
        return True

    def reap(self) -> None:
        """Call `on_done` of completed syncs."""
        try:  # noqa: SIM105  # `suppress` takes longer than the call
            os.eventfd_read(self._eventfd)
        except BlockingIOError:
            pass
        try:
            count = self._call(self._get, self._queue, 0, SYNCS_MAX, self._events_at)
        except InterruptedError:
            return  # interrupted by a signal; no sync is done
        for number, error in decode_events(self._events, count):
            self._waiting.pop(number)(error)

    def close(self) -> None:
        """Close it; outstanding syncs are not reported. Call it once."""
        os.close(self._eventfd)
        if self.is_idle:
            _free_queues.append(self._queue)

    def _call(self, number: int, *args: int) -> int:
        result: int = self._libc(number, *args, *(0,) * (5 - len(args)))
        if result < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        return result
