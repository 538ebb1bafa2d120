"""ZooKeeper servers of tests: their class path, and ways to disturb them.

The class path lacks the logging libraries, which take more than half of a start's
processor time; only the server's own tests read the log. Other output of the server is
in `zookeeper.out`.
"""

import os
import shutil
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from metaq.zk.embedded import CLASSPATH_VARIABLE, EmbeddedZooKeeper
from tests.sampling import IS_WHOLE

NEEDED: Final = ("zookeeper-", "slf4j-api-", "metrics-core-", "netty-", "snappy-java-")
"""Prefixes of the names of the jars that are needed."""


def use_quiet_server() -> None:
    """Start all further servers without a log.

    No effect in a whole run, or if a class path is set.
    """
    spec = find_spec("pyspark")
    if IS_WHOLE or spec is None or CLASSPATH_VARIABLE in os.environ:
        return
    assert spec.origin is not None
    jars = Path(spec.origin).parent.glob("jars/*.jar")
    needed = sorted(str(jar) for jar in jars if jar.name.startswith(NEEDED))
    os.environ[CLASSPATH_VARIABLE] = os.pathsep.join(needed)


class HandledZooKeeper(EmbeddedZooKeeper):
    """A server that tests restart, freeze and empty."""

    def restart(self) -> None:
        """Stop, then start on the same data and port."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """Freeze the server: connections stay open and silent."""
        assert self.pid is not None
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Continue a frozen server."""
        assert self.pid is not None
        os.kill(self.pid, signal.SIGCONT)

    def wipe(self) -> None:
        """Delete all data of a stopped server."""
        assert not self.is_running
        shutil.rmtree(self.data_dir / "data", ignore_errors=True)
