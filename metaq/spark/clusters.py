"""The clusters of this process: one for each way to brokers that options name.

Tasks import this and, as a rule, ask no cluster: the client with ZooKeeper and all is
imported when one is asked for.
"""

from typing import TYPE_CHECKING, Final

from metaq.spark.options import WireOptions

if TYPE_CHECKING:
    from metaq.spark.cluster import Cluster

CLUSTERS: Final[dict[WireOptions, "Cluster"]] = {}


def shared_cluster(wire: WireOptions) -> "Cluster":
    """Return this process's way to the brokers that some options lead to."""
    from metaq.spark.cluster import Cluster  # noqa: PLC0415  # see the top

    cluster = CLUSTERS.get(wire)
    if cluster is None or not cluster.is_usable:
        cluster = CLUSTERS[wire] = Cluster(wire)
    return cluster
