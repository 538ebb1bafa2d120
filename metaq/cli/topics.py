"""`metaq topics`: which topics there are, where, and how far they go."""

from metaq.cli import render
from metaq.cli.cluster import Target
from metaq.client.browser import TopicBrowser
from metaq.client.discovery import Cluster
from metaq.clock import SystemClock
from metaq.model import TopicPartition

COLUMNS = ("topic", "partition", "broker", "puts", "gets", "log_start", "log_end")


def topics(target: Target, wanted: tuple[str, ...], *, as_json: bool) -> None:
    """Print one row per partition.

    Args:
        target: which cluster.
        wanted: names of topics; none of them is all.
        as_json: one object per row.

    Raises:
        NoBrokerError: a topic that was named is nowhere.
    """
    cluster = target.read()
    rows = []
    with TopicBrowser(
        cluster, timeout_s=target.timeout_s, clock=SystemClock()
    ) as browser:
        for topic in wanted or cluster.topics:
            if not cluster.puts.get(topic) and not cluster.gets.get(topic):
                cluster.partitions(topic, cluster.gets)  # raises, and names the others
            for partition in _partitions(cluster, topic):
                number, broker_id = partition.partition, partition.broker_id
                ends = (
                    browser.range_of(partition)
                    if broker_id in cluster.brokers
                    else None
                )
                rows.append(
                    (
                        topic,
                        f"{broker_id}-{number}",
                        str(cluster.brokers.get(broker_id, "unreachable")),
                        number < cluster.puts.get(topic, {}).get(broker_id, 0),
                        number < cluster.gets.get(topic, {}).get(broker_id, 0),
                        ends[0] if ends else None,
                        ends[1] if ends else None,
                    )
                )
    render.print_rows(COLUMNS, rows, as_json=as_json)


def _partitions(cluster: Cluster, topic: str) -> list[TopicPartition]:
    counts: dict[TopicPartition, None] = {}
    for known in (cluster.puts, cluster.gets):
        for broker_id, count in known.get(topic, {}).items():
            for number in range(count):
                counts[TopicPartition(topic, broker_id, number)] = None
    return sorted(counts)
