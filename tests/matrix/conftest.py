"""The servers that the matrix mistreats."""

from tests.integration.conftest import zookeeper, zookeeper_alone, zookeeper_server

__all__ = ["zookeeper", "zookeeper_alone", "zookeeper_server"]
