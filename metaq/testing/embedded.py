"""A real broker in a test: on its own thread, a free port, an in-memory ZooKeeper.

    with embedded_broker(topics={"orders": 2}) as broker:
        with Client(**broker.client_options) as client:
            ...
        broker.restart()

It is the package's broker with its real storage and syncs; only ZooKeeper is replaced
by `metaq.testing.zk`, which has the same contract. It needs no Docker, Java or set-up,
and works with any test framework; `metaq.testing.pytest_plugin` has it as a fixture.
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from metaq.broker.app import Broker
from metaq.clock import Clock, SystemClock
from metaq.config.load import load_config
from metaq.errors import MetaqError
from metaq.model import BrokerId
from metaq.testing.servers import HOST, TIMEOUT_S, ThreadOwner, reserve_port
from metaq.testing.zk import MemoryZooKeeper
from metaq.zk.paths import BrokerRole, NodeKind, NodePaths, normalize_root
from metaq.zk.session import Coordinator
from metaq.zk.znodes import decode_registration

DEFAULT_TOPICS: Final[Mapping[str, int]] = {"test": 1}

POLL_S: Final = 0.001

# Clients in the same process are notified of a stop at once: 100 ms are enough.
_SETTINGS: Final = """
[system]
brokerId=0
numPartitions=1
serverPort={port}
hostName=127.0.0.1
dataPath={data}
unflushThreshold=0
unflushInterval=10000
maxSegmentSize=1024*1024*1024
maxTransferSize=1024*1024
[zookeeper]
; It is in this process: a name that each machine can resolve.
zk.zkConnect=localhost
zk.zkSyncTimeMs=100
"""


class EmbeddedBroker(ThreadOwner):
    """One broker. Owned by the test that created it.

    Lifecycle: `start` and `stop`, repeatedly, on the same port and data;
    `embedded_broker` calls both. A start recovers the data directory; a stop withdraws
    the broker and answers requests in flight. A start raises MetaqError if the broker
    cannot start, a stop if a part of it had failed. Every method may be called from any
    thread but the broker's own; it blocks until done, at most TIMEOUT_S.
    """

    def __init__(
        self,
        data_path: str | os.PathLike[str],
        *,
        topics: Mapping[str, int] = DEFAULT_TOPICS,
        zookeeper: MemoryZooKeeper | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """Configure a broker; nothing is opened before `start`.

        Args:
            data_path: directory of its data and settings, created if missing. Its
                parent must exist. It is kept when the broker stops.
            topics: topic → number of partitions.
            zookeeper: ZooKeeper to register in; by default a new one. Brokers that
                share one need different `brokerId` settings.
            settings: key → value, overrides as by `metaq broker --set`.
        """
        super().__init__("embedded-broker")
        self.zookeeper = zookeeper or MemoryZooKeeper()
        """ZooKeeper of the broker; a test may stop and start it, and expire
        sessions."""
        self.port = 0
        """Port of the listener; valid after `start`, and kept across restarts."""
        self.data_path = Path(data_path)
        """Directory of the data, and of the settings in `server.ini`."""
        self._topics = dict(topics)
        self._settings = dict(settings or {})
        self._clock = SystemClock()
        self._broker: Broker | None = None

    # -- for clients ------------------------------------------------------------------

    @property
    def address(self) -> str:
        """`host:port`, for clients without ZooKeeper; valid after `start`."""
        return f"{HOST}:{self.port}"

    @property
    def coordinator_factory(self) -> Callable[[Clock], Coordinator]:
        """Factory of sessions with the broker's ZooKeeper, for any event loop."""
        return self.zookeeper.coordinator

    @property
    def client_options(self) -> Mapping[str, Any]:
        """Keyword arguments of `Client` for this broker."""
        return {"coordinator": self.coordinator_factory}

    # -- life -------------------------------------------------------------------------

    def restart(self) -> None:
        """Stop, then start on the same port and data."""
        self.stop()
        self.start()

    def create_topic(self, name: str, partitions: int = 1) -> None:
        """Add a topic, or change its number of partitions.

        Returns when the topic is registered in ZooKeeper. While the broker is stopped,
        takes effect at the next start.

        Args:
            name: topic name.
            partitions: number of partitions, 1 or more.

        Raises:
            ConfigError: name or number are invalid.
            TimeoutError: it is not registered after TIMEOUT_S.
        """
        before = dict(self._topics)
        self._topics[name] = partitions
        if self._broker is None or self._thread is None:
            return
        self._write_settings()
        try:
            self._thread.run(self._broker.control.reload())
        except MetaqError:
            self._topics = before
            self._write_settings()
            raise
        self._wait_registered(name, partitions, self._broker)

    async def _start(self) -> None:
        self.port = self.port or reserve_port(self)
        self.data_path.mkdir(exist_ok=True)
        self._write_settings()
        config = load_config(
            str(self._settings_path),
            lambda path: Path(path).read_bytes(),
            self._settings,
        )
        broker = Broker(
            config,
            overrides=self._settings,
            clock=self._clock,
            coordinator=self.zookeeper.coordinator(self._clock),
        )
        await broker.start()
        self._broker, self.port = broker, broker.port

    async def _stop(self) -> None:
        broker, self._broker = self._broker, None
        assert broker is not None
        await broker.stop()
        if broker.failure is not None:
            raise MetaqError(f"the broker failed: {broker.failure}") from broker.failure

    @property
    def _settings_path(self) -> Path:
        return self.data_path / "server.ini"

    def _write_settings(self) -> None:
        text = _SETTINGS.format(port=self.port, data=self.data_path)
        for name, count in self._topics.items():
            text += f"[topic={name}]\nnumPartitions={count}\n"
        self._settings_path.write_text(text)

    def _wait_registered(self, topic: str, partitions: int, broker: Broker) -> None:
        config = broker.context.config
        role = BrokerRole(BrokerId(config.system.broker_id))
        paths = NodePaths(normalize_root(config.zookeeper.root))
        path = paths.topic(NodeKind.TOPIC_PUB, topic, role)
        deadline_s = self._clock.monotonic_s() + TIMEOUT_S
        while True:
            node = self.zookeeper.nodes.get(path)
            if node and decode_registration(node.data).partition_count == partitions:
                return
            if self._clock.monotonic_s() > deadline_s:
                raise TimeoutError(f"topic '{topic}' is not registered at {path}")
            time.sleep(POLL_S)


@contextlib.contextmanager
def embedded_broker(
    *,
    topics: Mapping[str, int] = DEFAULT_TOPICS,
    data_path: str | os.PathLike[str] | None = None,
    zookeeper: MemoryZooKeeper | None = None,
    settings: Mapping[str, str] | None = None,
) -> Iterator[EmbeddedBroker]:
    """Run a broker during the block.

    Args:
        topics: topic → number of partitions.
        data_path: directory of its data; None: a temporary one, deleted at the end.
        zookeeper: ZooKeeper to register in; by default a new one.
        settings: key → value, overrides as by `metaq broker --set`.

    Yields:
        The running broker; it is stopped after the block.
    """
    with contextlib.ExitStack() as stack:
        if data_path is None:
            data_path = stack.enter_context(tempfile.TemporaryDirectory())
        broker = EmbeddedBroker(
            data_path, topics=topics, zookeeper=zookeeper, settings=settings
        )
        yield stack.enter_context(broker)
