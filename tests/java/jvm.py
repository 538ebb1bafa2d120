"""One Java virtual machine with MetaQ's jars, driven from Python by Py4J.

The machine ends with its parent. Its home is a directory of the tests, so that what
MetaQ keeps under `~` is there; what it logs is in `java.log`.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from py4j.java_gateway import (
    CallbackServerParameters,
    GatewayParameters,
    JavaGateway,
    launch_gateway,
)

from metaq.zk.embedded import find_java

HEAP_MIB = 256
QUICK_START = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", f"-Xmx{HEAP_MIB}m")
"""Options of machines that do not live long enough for more."""
END_TIMEOUT_S = 60.0
LOG4J_PROPERTIES = """\
log4j.rootLogger=INFO, file
log4j.appender.file=org.apache.log4j.FileAppender
log4j.appender.file.File={home}/java.log
log4j.appender.file.layout=org.apache.log4j.PatternLayout
log4j.appender.file.layout.ConversionPattern=%d %-5p [%t] %c{{1}} - %m%n
"""


def write_log4j_properties(home: Path) -> None:
    """Have a machine that has this directory in its class path log to `java.log`."""
    text = LOG4J_PROPERTIES.format(home=home)
    (home / "log4j.properties").write_text(text)


class Jvm:
    """A machine and the way into it. Lifecycle: a context manager."""

    def __init__(
        self,
        jars: Sequence[Path],
        home: Path,
        *,
        java_options: Sequence[str] = QUICK_START,
    ) -> None:
        self.home = home
        """Home directory of Java's user."""
        self.log = home / "java.log"
        self._jars = jars
        self._java_options = java_options

    def __enter__(self) -> Self:
        write_log4j_properties(self.home)
        with (self.home / "java.err").open("w") as err:
            port, token, self._process = launch_gateway(
                classpath=os.pathsep.join(map(str, (self.home, *self._jars))),
                javaopts=[*self._java_options, f"-Duser.home={self.home}"],
                java_path=find_java(),
                redirect_stderr=err,
                die_on_exit=True,
                enable_auth=True,
                return_proc=True,
            )
        self._gateway = JavaGateway(
            gateway_parameters=GatewayParameters(
                port=port, auth_token=token, auto_convert=True
            )
        )
        # A Java machine started like this has no token to show when it calls back.
        self._gateway.start_callback_server(
            CallbackServerParameters(port=0, daemonize=True, daemonize_connections=True)
        )
        server = self._gateway.java_gateway_server
        server.resetCallbackClient(
            server.getCallbackClient().getAddress(),
            self._gateway.get_callback_server().get_listening_port(),
        )
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._gateway.shutdown()
        self._process.stdin.close()
        self._process.wait(END_TIMEOUT_S)

    @property
    def metaq(self) -> Any:
        """Package `com.taobao.metamorphosis`; classes are its attributes."""
        return self.package("com.taobao.metamorphosis")

    def package(self, name: str) -> Any:
        """Return a package by its whole name, as in `java.util`."""
        found = self._gateway.jvm
        for part in name.split("."):
            found = getattr(found, part)
        return found
