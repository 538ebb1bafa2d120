"""The accept loop: accepts connections within limits.

The loop's reader accepts connections in batches. There are two limits, one in total and
one per remote address; a connection above a limit is closed at once, which a client
sees as a refused connection. When the process has no descriptors left (EMFILE),
accepting pauses for PAUSE_S: connections stay in the kernel's backlog, open ones
continue, and the files of the log are not affected.

Accepted sockets get TCP_NODELAY and keep-alive. The kernel sizes their buffers to the
path; MetaQ's fixed 64 KiB would only slow down a fast peer.

Source: docs/metaq-1.4/broker.md 1.1.
"""

import asyncio
import errno
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from metaq.errors import MetaqError
from metaq.stats import counter, gauge

_log = logging.getLogger(__name__)

BACKLOG: Final = 1000
"""Length of the kernel's accept queue (docs/metaq-1.4/broker.md 1.1)."""

ACCEPT_BATCH_MAX: Final = 64
"""Maximum number of connections accepted before other events get their turn."""

PAUSE_S: Final = 0.5
"""Length of a pause in accepting when no descriptors are left, in seconds."""

QUIET_S: Final = 60.0
"""Shortest time between log lines about such pauses, in seconds."""

_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class ListenError(MetaqError):
    """The listener cannot bind to its address and port."""


@dataclass(slots=True)
class ListenerStatistics:
    """A listener's counters. Snapshots are copies."""

    open_count: int = gauge("metaq_connections", "Connections that are open.")
    accepted_count: int = counter(
        "metaq_connections_accepted_total", "Connections taken."
    )
    refused_count: int = counter(
        "metaq_connections_refused_total",
        "Connections closed at once because a cap was reached.",
    )
    exhausted_count: int = counter(
        "metaq_accept_pauses_total",
        "Pauses of accepting because the process had no descriptors left.",
    )
    problem: str = ""
    """Reason why connections wait to be accepted; "" if none do."""


class Listener:
    """A listening socket. Owned by the broker; used on the loop's thread only."""

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        on_connection: Callable[[socket.socket, str], None],
        connection_count_max: int,
        connection_count_per_host_max: int,
        pause_s: float = PAUSE_S,
    ) -> None:
        """Create a listener; `open` binds it.

        Args:
            loop: the loop whose thread calls everything here.
            on_connection: gets each accepted socket, which it then owns, and the host
                to pass to `forget` when the connection is closed.
            connection_count_max: limit in total, 1 or more.
            connection_count_per_host_max: limit per remote address; 0: no limit.
            pause_s: seconds without accepting after descriptors or memory ran out.
        """
        self._loop = loop
        self._on_connection = on_connection
        self._count_max = connection_count_max
        self._per_host_max = connection_count_per_host_max
        self._pause_s = pause_s
        self._sock: socket.socket | None = None
        self._resume: asyncio.TimerHandle | None = None
        self._quiet_until_s = 0.0
        self._is_logged = False
        """Whether the current pause was logged."""
        self._hosts: Counter[str] = Counter()
        self._counts = ListenerStatistics()

    def open(self, host: str, port: int) -> int:
        """Bind and listen; connections are accepted from then on.

        Args:
            host: address to bind; "" for every interface, IPv4 and IPv6.
            port: TCP port; 0 lets the system pick one.

        Returns:
            The port that is bound.

        Raises:
            ListenError: the address is in use or not ours.
        """
        try:
            sock = _bind(host, port)
        except OSError as error:
            # The error of create_server repeats the address; the error of a failed name
            # look-up has a negative number.
            number = error.errno or 0
            reason = os.strerror(number) if number > 0 else error.strerror
            where = f"{host or '*'}:{port}"
            raise ListenError(f"cannot listen on {where}: {reason}") from error
        sock.setblocking(False)
        self._sock = sock
        self._loop.add_reader(sock.fileno(), self._on_acceptable)
        bound: int = sock.getsockname()[1]
        return bound

    def close(self) -> None:
        """Stop listening; connections stay open. A second call does nothing."""
        if self._resume is not None:
            self._resume.cancel()
            self._resume = None
        if self._sock is not None:
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()
            self._sock = None

    def forget(self, host: str) -> None:
        """Count a connection from `host` as closed."""
        self._counts.open_count -= 1
        self._hosts[host] -= 1
        if not self._hosts[host]:
            del self._hosts[host]

    def statistics(self) -> ListenerStatistics:
        """Return a snapshot of the counters."""
        return replace(self._counts)

    def _on_acceptable(self) -> None:
        for _ in range(ACCEPT_BATCH_MAX):
            if self._sock is None or self._resume is not None:
                return
            try:
                sock, address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                self._note_accepting()
                return
            except OSError as error:
                self._on_accept_error(error)
                return
            except MemoryError:
                self._on_accept_error(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)))
                return
            # An IPv4 host counts as one host, also when it uses an IPv6 socket.
            self._admit(sock, str(address[0]).removeprefix("::ffff:"))
            if self._resume is None:
                self._note_accepting()

    def _note_accepting(self) -> None:
        """Record that no connection waits for descriptors or memory."""
        self._counts.problem = ""
        if self._is_logged:
            self._is_logged = False
            _log.info("accepting again: pauses=%d", self._counts.exhausted_count)

    def _on_accept_error(self, error: OSError) -> None:
        if error.errno not in _EXHAUSTED:
            # The connection ended in the backlog; the next one may be fine.
            _log.warning("accept failed: error=%s", error)
            return
        self._counts.exhausted_count += 1
        if not self._counts.problem and self._loop.time() >= self._quiet_until_s:
            # A shortage may last for hours, or come and go.
            self._is_logged, self._quiet_until_s = True, self._loop.time() + QUIET_S
            _log.error(
                "accept paused, no descriptors or memory left: error=%s open=%d"
                " pause_s=%s",
                error.strerror,
                self._counts.open_count,
                self._pause_s,
            )
        self._counts.problem = (
            f"connections wait, and {self._counts.open_count} are open:"
            f" {error.strerror}"
        )
        assert self._sock is not None
        self._loop.remove_reader(self._sock.fileno())
        self._resume = self._loop.call_later(self._pause_s, self._on_resume)

    def _on_resume(self) -> None:
        self._resume = None
        if self._sock is not None:
            self._loop.add_reader(self._sock.fileno(), self._on_acceptable)

    def _admit(self, sock: socket.socket, host: str) -> None:
        is_full = self._counts.open_count >= self._count_max
        is_host_full = 0 < self._per_host_max <= self._hosts[host]
        if is_full or is_host_full:
            self._counts.refused_count += 1
            if self._counts.refused_count & (self._counts.refused_count - 1) == 0:
                # Only every power of two is logged: a flood must not fill the disk.
                _log.warning(
                    "connection refused: host=%s open=%d from_host=%d refused=%d",
                    host,
                    self._counts.open_count,
                    self._hosts[host],
                    self._counts.refused_count,
                )
            sock.close()
            return
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        except OSError:
            sock.close()
            return
        self._counts.open_count += 1
        self._counts.accepted_count += 1
        self._hosts[host] += 1
        try:
            self._on_connection(sock, host)
        except MemoryError:
            sock.close()
            self.forget(host)
            self._on_accept_error(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)))


def limit_accept_errors(loop: asyncio.AbstractEventLoop) -> None:
    """Make asyncio's own servers log a lack of descriptors at most once in `QUIET_S`.

    By default they log a traceback for each connection in their backlog, repeatedly.
    Other errors of the loop are logged as before.
    """
    quiet_until_s = float("-inf")

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal quiet_until_s
        error, sock = context.get("exception"), context.get("socket")
        is_lack = isinstance(error, OSError) and error.errno in _EXHAUSTED
        if sock is None or not is_lack:
            loop.default_exception_handler(context)
        elif loop.time() >= quiet_until_s:
            quiet_until_s = loop.time() + QUIET_S
            text = "accept paused, no descriptors or memory left: error=%s address=%s"
            _log.error(text, error, sock.getsockname())

    loop.set_exception_handler(handle)


def _bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; "" binds IPv4 and IPv6 on all interfaces in one."""
    if not host and socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("::", port),
                family=socket.AF_INET6,
                backlog=BACKLOG,
                dualstack_ipv6=True,
            )
        except OSError as error:
            # A kernel with IPv6 switched off at run time.
            if error.errno not in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}:
                raise
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG)
