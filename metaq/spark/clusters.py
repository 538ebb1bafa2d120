"""The clusters of this process: one for each set of connection options.

Tasks import this module but usually need no cluster, so the client and its ZooKeeper
library are imported on first use.
"""

from typing import TYPE_CHECKING, Final

from metaq.spark.options import WireOptions

if TYPE_CHECKING:
    from metaq.spark.cluster import Cluster

CLUSTERS: Final[dict[WireOptions, "Cluster"]] = {}


def shared_cluster(wire: WireOptions) -> "Cluster":
    """Return this process's cluster for these options; create it if needed."""
    from metaq.spark.cluster import Cluster  # noqa: PLC0415  # see the top

    cluster = CLUSTERS.get(wire)
    if cluster is None or not cluster.is_usable:
        cluster = CLUSTERS[wire] = Cluster(wire)
    return cluster
