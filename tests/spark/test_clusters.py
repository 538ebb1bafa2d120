"""One cluster for each way to brokers in a process."""

from types import SimpleNamespace
from typing import Any

from metaq.spark.clusters import CLUSTERS, shared_cluster
from metaq.spark.options import SinkOptions
from tests.spark.brokers import own_clusters


def test_equal_options_share_a_cluster_that_can_be_used() -> None:
    """The child of a fork makes one of its own."""
    one, two = (
        SinkOptions.from_map({"brokers": name, "topic": "t"}).wire
        for name in ("a:1", "b:1")
    )
    with own_clusters():
        found = shared_cluster(one)
        assert shared_cluster(one) is found
        assert shared_cluster(two) is not found
        parent: Any = SimpleNamespace(is_usable=False)
        CLUSTERS[one] = parent
        assert shared_cluster(one) is not parent
        found.close()
