"""One cluster for each way to brokers in a process."""

import pytest

from metaq.spark.clusters import shared_cluster
from metaq.spark.options import SinkOptions
from tests.spark.brokers import own_clusters


def test_equal_options_share_a_cluster_that_can_be_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The child of a fork makes one of its own."""
    one, two = (
        SinkOptions.from_map({"brokers": name, "topic": "t"}).wire
        for name in ("a:1", "b:1")
    )
    with own_clusters():
        found = shared_cluster(one)
        assert shared_cluster(one) is found
        assert shared_cluster(two) is not found
        with monkeypatch.context() as patch:
            patch.setattr(type(found), "is_usable", False)
            assert shared_cluster(one) is not found
        found.close()
