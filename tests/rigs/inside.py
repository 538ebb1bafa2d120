"""Access to the few private parts that tests need: one function for each.

There is no public way to them, and there should be none. `tests/house/test_seams.py`
bounds the accesses in other files of tests.
"""

from collections.abc import Callable
from typing import Any

from metaq.broker.app import Broker
from metaq.broker.hot_puts import HotPuts
from metaq.broker.orders import perform
from metaq.broker.session import Session
from metaq.client.consume.consumer import AsyncMessageBatch
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
    """Return the async object of a sync one."""
    return sync_object._twin


def thread_calls_of(consumer: Any) -> Any:
    """Return the object that calls the hooks of a sync consumer."""
    return consumer._calls


def commit_owner_of(directory: LogDir) -> CommitOwner:
    """Return the commit owner of a data directory: which thread commits to it."""
    return directory._worker


def subscription_of(consumer: Any) -> Any:
    """Return the subscription state of an async consumer."""
    return consumer._subscription


def move_consumer(consumer: Any, partition: TopicPartition, offset: int) -> None:
    """Move a consumer, sync or async, to any offset, even one without a record."""

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
    """Have a consumer deliver a batch again, as after a rolled back transaction."""
    AsyncMessageBatch(consumer, batch._filling).redeliver()


def buffers_of(fetch_buffer: Any) -> dict[TopicPartition, Any]:
    """Return the buffers of a fetch buffer, by partition."""
    buffers: dict[TopicPartition, Any] = fetch_buffer._buffers
    return buffers


def sleepers_of(fetch_buffer: Any) -> set[Any]:
    """Return the futures of tasks that wait for a batch."""
    sleepers: set[Any] = fetch_buffer._sleepers
    return sleepers


def loop_thread_of(client: Any) -> Any:
    """Return the loop thread of a sync client."""
    return client._require_thread()


def wrap_socket(owner: Any, wrap: Callable[[Any], Any]) -> None:
    """Wrap the socket of a channel or listener, to inject failures."""
    owner._sock = wrap(owner._sock)


def session_identity(coordinator: Any) -> tuple[int, bytes]:
    """Return id and password of a ZooKeeper session, which allow to end it."""
    session = coordinator._session
    return session.session_id, session.password


def hot_puts_of(session: Session) -> HotPuts:
    """Return the fast path for ordinary puts of a session."""
    return session._hot


def check_sessions(broker: Broker) -> None:
    """Check the sessions at once instead of in the next housekeeping."""
    broker._check_sessions()


def wake_housekeeping(broker: Broker) -> None:
    """Wake the housekeeping, after a test has moved its clock."""
    broker._housekeeping.wake()


def running_inside(embedded: EmbeddedBroker) -> Broker:
    """Return the broker inside an embedded one, for use on its loop's thread only."""
    assert embedded._broker is not None
    return embedded._broker


def change_settings(embedded: EmbeddedBroker, **settings: str) -> None:
    """Change the settings of an embedded broker, from its next start on."""
    embedded._settings |= settings


def order_inside(embedded: EmbeddedBroker, command: str, **fields: Any) -> None:
    """Carry out an operator's order in an embedded broker, without the socket."""
    assert embedded._thread is not None
    request = {"command": command, **fields}
    embedded._thread.run(perform(running_inside(embedded).control, request))


def use_disk(ordered_producer: Any, fs: FileSystem) -> None:
    """Set the file system of an ordered producer that is not started."""
    ordered_producer._fs = fs


def kill(source: Any) -> None:
    """Cancel the tasks of a group member, as when its process is killed."""
    source._task.cancel()
    if source._taking is not None:
        source._taking.cancel()


def abort(connection: BrokerConnection) -> None:
    """Abort a connection, as the kernel does for a killed process."""
    connection._channel.abort("killed")


def store_of(node: ReplicaNode) -> ReplicaStore:
    """Return the store of a replica."""
    return node._store


def log_manager_of(broker: Broker) -> LogManager:
    """Return the log manager of a broker."""
    return broker._logs
