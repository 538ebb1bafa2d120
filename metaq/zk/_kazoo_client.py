"""Clients of kazoo: made patient and quiet, closed without waiting for them.

`_kazoo.py` is their only user; the two are the only modules that see kazoo.
"""

import inspect
import logging
import math
import select
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Queue, SimpleQueue
from typing import Any, Final, TypeAlias

from kazoo import __version__ as kazoo_version
from kazoo import exceptions as kz
from kazoo.client import KazooClient
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.hosts import collect_hosts
from kazoo.protocol.serialization import Connect
from kazoo.protocol.states import KazooState
from kazoo.retry import KazooRetry

from metaq.errors import ConfigError

_log = logging.getLogger(__name__)

RECONNECT_DELAY_S_MIN: Final = 0.1
RECONNECT_DELAY_S_MAX: Final = 5.0
# kazoo waits for a server's greeting for the session time-out divided by the number of
# servers. A server that is starting may accept and never greet (ZooKeeper 3.9 does,
# when a client comes before its data is loaded); with a single server named that wait
# would cost the session, so that servers are named often enough for this many tries.
GREETINGS_PER_SESSION_TIMEOUT: Final = 3
# The arguments wrapped in `_watch_greetings`, and the releases tried with it.
INVOKE_PARAMETERS: Final = ("timeout", "request", "xid")
KAZOO_KNOWN: Final = "kazoo>=2.10,<2.12"


@dataclass(frozen=True, slots=True)
class CloseOrder:
    """Request to the thread that closes a client."""

    post_closed: Callable[[], None]
    """Called on that thread, after the close."""
    patience_s: float
    """Seconds to wait for a client to reconnect: its session may live on, with all its
    nodes, at a server that was away, and can be ended then."""


class _AtOnce(Queue[Any]):
    """A queue of work that is done at once, on the thread that brings it."""

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Do the work; what is not callable asks the queue's thread to stop."""
        if not callable(item):
            super().put(item, block, timeout)
            return
        try:
            item()
        except Exception:  # noqa: BLE001  # it would end the connection's thread
            _log.exception("an answer of zookeeper was not taken")


class _Handler(SequentialThreadingHandler):  # type: ignore[misc]  # kazoo has no types
    """kazoo's threads, with fewer changes of threads and system calls.

    An answer goes from the connection's thread to the loop without a third one, and
    waiting for a socket is one call instead of five.
    """

    def __init__(self) -> None:
        super().__init__()
        self.completion_queue = _AtOnce()

    def select(
        self,
        rlist: Sequence[Any],
        wlist: Sequence[Any],
        _xlist: Sequence[Any],
        timeout: float | None = None,
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Wait as `select.select` does, also for descriptors above 1023."""
        poll = select.poll()
        for mask, ones in ((select.POLLIN, rlist), (select.POLLOUT, wlist)):
            for one in ones:
                poll.register(one, mask)
        wait_ms = None if timeout is None else math.ceil(max(0.0, timeout) * 1000)
        ready = dict(poll.poll(wait_ms))
        if select.POLLNVAL in ready.values():
            raise ValueError("a socket was closed by another thread")
        # As with select, the end of a connection makes it readable, and writable.
        readable = [one for one in rlist if one.fileno() in ready]
        return readable, [one for one in wlist if one.fileno() in ready], []


Close: TypeAlias = Callable[[CloseOrder | None], None]
"""Has a client closed, without waiting; see `begin_closer`."""


def make_client(hosts: str, session_timeout_s: float) -> Any:
    """Return a client of kazoo that tries for ever to connect, once it is started.

    Its `greeted_timeout_ms` is the session time-out that the server chose, 0 before.

    Args:
        hosts: `host:port,host:port` and optionally `/chroot`, as zk.zkConnect.
        session_timeout_s: the wanted time-out; the server may change it.

    Raises:
        ConfigError: `hosts` is not of that form.
    """
    check_hosts(hosts)
    try:
        client = KazooClient(
            hosts=_repeated(hosts),
            timeout=session_timeout_s,
            connection_retry=KazooRetry(
                max_tries=-1,
                delay=RECONNECT_DELAY_S_MIN,
                backoff=2,
                max_delay=RECONNECT_DELAY_S_MAX,
            ),
            handler=_Handler(),
            logger=_client_log(),
        )
    except (ValueError, kz.KazooException) as error:
        raise _refusal(hosts, error) from error
    _watch_greetings(client)
    return client


def check_hosts(hosts: object) -> None:
    """Refuse a string that names no ZooKeeper server; makes no connection.

    Args:
        hosts: as in `make_client`.

    Raises:
        TypeError: `hosts` is no text.
        ConfigError: it is not of that form.
    """
    if not isinstance(hosts, str):
        kind = type(hosts).__name__
        raise TypeError(f"zookeeper: expected str, got {kind} {hosts!r:.80}")
    try:
        for host in server_hosts(hosts):
            # kazoo's thread would end at a name that no resolver can be asked for.
            host.encode("idna")
    except ValueError as error:
        raise _refusal(hosts, error) from error


def server_hosts(hosts: str) -> list[str]:
    """Return the names or addresses of the servers in a zk.zkConnect.

    Raises:
        ValueError: it is not of that form.
    """
    return [host for host, _port in collect_hosts(hosts)[0]]


def _refusal(hosts: object, error: Exception) -> ConfigError:
    return ConfigError(
        f"zk.zkConnect={hosts!r}: expected host:port,host:port/root, got {error}"
    )


def close_nothing(order: CloseOrder | None) -> None:
    """Stand in for a client that has not begun."""
    if order is not None:
        order.post_closed()


def begin_closer(client: Any) -> Close:
    """Begin the thread that will close a client; return what has it do that, once.

    It stops the client, which ends the session of a connected one, and frees its
    sockets; without an order it ends and does not touch the client. kazoo's stop blocks
    until its threads are gone, which an unreachable server can delay by ten seconds and
    more. A daemon thread cannot delay our exit; and it begins now, because later there
    may be no memory for it.

    Raises:
        RuntimeError: no thread can begin.
    """
    orders: SimpleQueue[CloseOrder | None] = SimpleQueue()

    def close() -> None:
        order = orders.get()
        if order is None:
            return
        try:
            if order.patience_s and not client.connected:
                _wait_connected(client, order.patience_s)
            client.stop()
            client.close()
        except Exception:  # noqa: BLE001  # top of a thread, and kazoo raises plain Exception
            _log.warning("zookeeper client did not close cleanly", exc_info=True)
        order.post_closed()

    threading.Thread(target=close, name="zk-close", daemon=True).start()
    return orders.put


def _wait_connected(client: Any, patience_s: float) -> None:
    """Wait until a client is connected again, or hears that its session is over."""
    is_decided = threading.Event()

    def on_state(state: KazooState) -> None:
        if state != KazooState.SUSPENDED:
            is_decided.set()

    client.add_listener(on_state)
    if not client.connected:
        is_decided.wait(patience_s)


def _repeated(hosts: str) -> str:
    """Return `hosts` with each server named often enough; the root is kept."""
    servers, slash, root = hosts.partition("/")
    count = servers.count(",") + 1
    times = -(-GREETINGS_PER_SESSION_TIMEOUT // count)
    return ",".join([servers] * times) + slash + root


def _client_log() -> logging.Logger:
    # kazoo reports every attempt to connect as a warning, several a minute while
    # ZooKeeper is away; our own transitions say it once.
    logger = logging.getLogger(f"{__name__}.client")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.ERROR)
    return logger


def _watch_greetings(client: Any) -> None:
    """Set `client.greeted_timeout_ms` to the time-out that the server chooses.

    kazoo does not expose it, so it is read from the greeting.

    Raises:
        ConfigError: this kazoo greets in another way than those that were tried.
    """
    connection = client._connection  # noqa: SLF001  # kazoo has no door here
    invoke: Any = getattr(connection, "_invoke", None)
    found = () if invoke is None else tuple(inspect.signature(invoke).parameters)
    if found != INVOKE_PARAMETERS or "time_out" not in Connect._fields:
        raise ConfigError(
            f"kazoo {kazoo_version} greets servers in another way than metaq knows:"
            f" expected _invoke({', '.join(INVOKE_PARAMETERS)}), got"
            f" ({', '.join(found)}); pip install '{KAZOO_KNOWN}'"
        )
    client.greeted_timeout_ms = 0

    def invoke_and_look(timeout: float, request: Any, xid: int | None = None) -> Any:
        answer = invoke(timeout, request, xid)
        if isinstance(request, Connect) and answer[0].time_out > 0:
            client.greeted_timeout_ms = answer[0].time_out
        return answer

    connection._invoke = invoke_and_look  # noqa: SLF001  # see above
