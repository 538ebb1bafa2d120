"""ZooKeepers that tests start: what is done to them, and their class path.

The class path lacks the libraries of its log: more than half of a start's processor
time goes into these, and no test but the server's own reads the log. What the server
says otherwise is in `zookeeper.out`.
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
"""Begin of the names of jars."""


def use_quiet_server() -> None:
    """Have all servers that start from now on be without a log.

    A whole run has logs, and a class path that was given is left.
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
        """Stop and start on the same data and port."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """Freeze the server: connections stay open and silent."""
        assert self.pid is not None
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let a frozen server go on."""
        assert self.pid is not None
        os.kill(self.pid, signal.SIGCONT)

    def wipe(self) -> None:
        """Remove all that a stopped server stored."""
        assert not self.is_running
        shutil.rmtree(self.data_dir / "data", ignore_errors=True)
