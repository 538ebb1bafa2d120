"""One Java machine and one Spark session for the tests of applications on a set."""

from tests.java.conftest import _plain_py4j, jvm

__all__ = ["_plain_py4j", "jvm"]
