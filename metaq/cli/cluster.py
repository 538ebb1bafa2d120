"""Which brokers a command talks to: those in ZooKeeper, or those it was given."""

from dataclasses import dataclass

import click

from metaq.client.discovery import (
    AddressSource,
    Cluster,
    ClusterSource,
    Counts,
    ZooKeeperSource,
)
from metaq.clock import SystemClock
from metaq.errors import CoordinationError
from metaq.model import TopicPartition
from metaq.zk.paths import NodePaths, normalize_root
from metaq.zk.znodes import SCHEME, BrokerAddress, decode_address


@dataclass(frozen=True, slots=True)
class Target:
    """What the options say."""

    zookeeper: str
    """`host:port[,host:port...][/chroot]`."""
    root: str
    """`zk.zkRoot` of the cluster."""
    brokers: tuple[str, ...]
    """`host:port` or `meta://host:port`; any of them leaves ZooKeeper out."""
    timeout_s: float
    """How long one question may take."""

    def source(self) -> ClusterSource:
        """Return whoever is to be asked.

        Raises:
            click.BadParameter: an address is none.
        """
        clock = SystemClock()
        if self.brokers:
            return AddressSource([parse_address(text) for text in self.brokers], clock)
        return ZooKeeperSource(
            self.zookeeper, NodePaths(normalize_root(self.root)), clock
        )

    def read(self) -> Cluster:
        """Return the cluster as it is now."""
        return self.source().read(timeout_s=self.timeout_s)


def parse_address(text: str) -> BrokerAddress:
    """Read `host:port` or `meta://host:port`.

    Raises:
        click.BadParameter: it is neither.
    """
    uri = text if text.startswith(SCHEME) else SCHEME + text
    try:
        return decode_address(uri.encode())
    except CoordinationError as error:
        raise click.BadParameter(f"'{text}' is not HOST:PORT") from error


def choose_partitions(
    cluster: Cluster, topic: str, counts: Counts, wanted: tuple[str, ...]
) -> tuple[TopicPartition, ...]:
    """Return the partitions that `--partition` names, all of them without one.

    Args:
        cluster: the snapshot.
        topic: topic name.
        counts: `puts` or `gets` of the snapshot.
        wanted: `BROKER-NUMBER`, or a number where only one broker has it.

    Raises:
        NoBrokerError: nobody serves the topic.
        click.BadParameter: there is no such partition, or more than one.
    """
    everything = cluster.partitions(topic, counts)
    if not wanted:
        return everything
    chosen = []
    for text in wanted:
        found = [
            p
            for p in everything
            if text in {f"{p.broker_id}-{p.partition}", str(p.partition)}
        ]
        if len(found) != 1:
            names = ", ".join(f"{p.broker_id}-{p.partition}" for p in everything)
            raise click.BadParameter(
                f"'{text}' names {len(found)} partitions of {topic}, expected one of"
                f" {names}",
                param_hint="--partition",
            )
        chosen += found
    return tuple(dict.fromkeys(chosen))
