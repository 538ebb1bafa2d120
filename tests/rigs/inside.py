"""The few private parts that tests reach into: one function for each.

Nothing public leads there, and nothing public should. `tests/house/test_seams.py`
bounds what other files of tests reach.
"""

from collections.abc import Callable
from typing import Any

from metaq.broker.app import Broker
from metaq.broker.hot_puts import HotPuts
from metaq.broker.orders import perform
from metaq.broker.session import Session
from metaq.fs import FileSystem
from metaq.model import TopicPartition
from metaq.peer.connection import BrokerConnection
from metaq.replication.node import ReplicaNode
from metaq.replication.store import ReplicaStore
from metaq.storage.commit_owner import CommitOwner
from metaq.storage.log_dir import LogDir
from metaq.storage.log_manager import LogManager
from metaq.testing.embedded import EmbeddedBroker


def twin_of(sync_object: Any) -> Any:
    """Return the async object behind one of the sync world."""
    return sync_object._twin


def thread_calls_of(consumer: Any) -> Any:
    """Return what calls the hooks of a consumer of the sync world."""
    return consumer._calls


def commit_owner_of(directory: LogDir) -> CommitOwner:
    """Return what says which thread has a data directory."""
    return directory._worker


def subscription_of(consumer: Any) -> Any:
    """Return what an async consumer reads, and where it stands."""
    return consumer._subscription


def move_consumer(consumer: Any, partition: TopicPartition, offset: int) -> None:
    """Have a consumer of either world read where its log has nothing; no call does."""

    async def move() -> None:
        twin._move(partition, offset)

    if hasattr(consumer, "_thread"):
        twin, run = consumer._twin, consumer._thread.run
    else:
        twin, run = consumer.twin, consumer._run
    run(move())


def fetchers_of(consumer: Any) -> Any:
    """Return the fetchers of an async consumer, by partition."""
    return consumer._subscription._fetchers


def redeliver(consumer: Any, batch: Any) -> None:
    """Have an async consumer give a batch back, as a rolled back transaction does."""
    assert getattr(batch, "twin", batch).consumer is consumer
    getattr(batch, "twin", batch).redeliver()


def buffers_of(fetch_buffer: Any) -> dict[TopicPartition, Any]:
    """Return what a fetch buffer has of each partition."""
    buffers: dict[TopicPartition, Any] = fetch_buffer._buffers
    return buffers


def sleepers_of(fetch_buffer: Any) -> set[Any]:
    """Return the futures of the tasks that wait for a batch."""
    sleepers: set[Any] = fetch_buffer._sleepers
    return sleepers


def loop_thread_of(client: Any) -> Any:
    """Return the thread on which a client of the sync world has its loop."""
    return client._require_thread()


def wrap_socket(owner: Any, wrap: Callable[[Any], Any]) -> None:
    """Put something between a channel or listener and its socket: kernels do not fail
    when a test says so."""
    owner._sock = wrap(owner._sock)


def session_identity(coordinator: Any) -> tuple[int, bytes]:
    """Return id and password of a ZooKeeper session, with which it can be ended."""
    session = coordinator._session
    return session.session_id, session.password


def hot_puts_of(session: Session) -> HotPuts:
    """Return the loop that takes a session's ordinary puts off its bytes."""
    return session._hot


def check_sessions(broker: Broker) -> None:
    """Do at once what housekeeping does some seconds later."""
    broker._check_sessions()


def wake_housekeeping(broker: Broker) -> None:
    """Have it look at its clock, which a test has moved."""
    broker._housekeeping.wake()


def running_inside(embedded: EmbeddedBroker) -> Broker:
    """Return the broker that an embedded one runs; its own loop's thread may use it."""
    assert embedded._broker is not None
    return embedded._broker


def change_settings(embedded: EmbeddedBroker, **settings: str) -> None:
    """Give an embedded broker other settings at its next start."""
    embedded._settings |= settings


def order_inside(embedded: EmbeddedBroker, command: str, **fields: Any) -> None:
    """Give an embedded broker an operator's order, without a socket."""
    assert embedded._thread is not None
    request = {"command": command, **fields}
    embedded._thread.run(perform(running_inside(embedded).control, request))


def use_disk(ordered_producer: Any, fs: FileSystem) -> None:
    """Have an ordered producer that is not started spool to another disk."""
    ordered_producer._fs = fs


def kill(source: Any) -> None:
    """End the tasks of a group member as the end of its process does."""
    source._task.cancel()
    if source._taking is not None:
        source._taking.cancel()


def abort(connection: BrokerConnection) -> None:
    """End a connection as the kernel does for a process that was killed."""
    connection._channel.abort("killed")


def store_of(node: ReplicaNode) -> ReplicaStore:
    """Return the disk of a replica of a set, as the replica has it."""
    return node._store


def log_manager_of(broker: Broker) -> LogManager:
    """Return the logs of a broker, with what can be done to them."""
    return broker._logs
