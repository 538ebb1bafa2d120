"""Waiting for what a watch of the cluster sees."""

from metaq.cluster_snapshot import ClusterSnapshot
from metaq.zk.cluster import ClusterWatch


async def wait_topic(
    watch: ClusterWatch, topic: str, *, deadline_s: float
) -> ClusterSnapshot:
    """Watch a topic, and return the first snapshot that knows about it."""
    watch.watch_topic(topic)
    snapshot = watch.snapshot
    while topic not in snapshot.topics:
        snapshot = await watch.wait_newer(snapshot.version, deadline_s=deadline_s)
    return snapshot
