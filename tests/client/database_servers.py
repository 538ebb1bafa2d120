"""PostgreSQL and MariaDB as real processes, on machines that have them."""

import contextlib
import importlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest
import sqlalchemy as sa

from tests.rigs.ports import reserved_port

PLACES: Final = (*Path("/usr/lib/postgresql").glob("*/bin"), Path("/usr/sbin"))
"""Directories in which distributions keep servers, beside PATH."""
START_TIMEOUT_S: Final = 60.0
POLL_S: Final = 0.05
NOBODY: Final = "nobody"
"""User they run as when root runs the tests: none of them wants to be root."""


def program(name: str, package: str) -> str:
    """Return where a program is; skip the test when it is nowhere.

    Args:
        name: its name.
        package: Debian's package that brings it.
    """
    path = os.pathsep.join([os.environ.get("PATH", ""), *map(str, PLACES)])
    found = shutil.which(name, path=path)
    if found is None:
        pytest.skip(f"no {name} here: install the package {package}")
    return found


class DatabaseServer:
    """One server on a free port of this machine; its files are deleted at its end."""

    def __init__(
        self, room: Path, url: str, command: Sequence[str], stop: signal.Signals
    ) -> None:
        """Take over a directory with a new database.

        Args:
            room: its directory.
            url: how SQLAlchemy reaches it.
            command: what starts it.
            stop: the signal for an orderly end, in spite of connections.
        """
        self.url: Final = url
        self._room = room
        self._command = command
        self._stop = stop
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        with (self._room / "log").open("ab") as log:
            self._child = subprocess.Popen(
                self._command, cwd=self._room, stdout=log, stderr=log, user=_user()
            )
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                self.execute("SELECT 1")
            except sa.exc.SQLAlchemyError:
                assert self._child.poll() is None, (self._room / "log").read_text()
                assert time.monotonic() < deadline_s
                time.sleep(POLL_S)
            else:
                return

    def end(self) -> None:
        """End it, with its connections."""
        if self._child is not None:
            self._child.send_signal(self._stop)
            self._child.wait(START_TIMEOUT_S)

    def execute(self, *texts: str) -> list[tuple[object, ...]]:
        """Run statements in one transaction; return the rows of the last one."""
        engine = sa.create_engine(self.url)
        try:
            with engine.begin() as connection:
                for text in texts:
                    result = connection.execute(sa.text(text))
                return [tuple(row) for row in result] if result.returns_rows else []
        finally:
            engine.dispose()


def _user() -> str | None:
    return NOBODY if os.geteuid() == 0 else None


@contextlib.contextmanager
def _room() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="metaq-db-") as name:
        room = Path(name)
        if user := _user():
            shutil.chown(room, user)
        yield room


def _prepare(room: Path, *command: str) -> None:
    done = subprocess.run(
        command, cwd=room, user=_user(), capture_output=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr.decode() or done.stdout.decode()


@contextlib.contextmanager
def postgresql() -> Iterator[DatabaseServer]:
    """Run a PostgreSQL inside the block."""
    initdb, postgres = (program(name, "postgresql") for name in ("initdb", "postgres"))
    _need_driver("psycopg")
    with _room() as room, reserved_port() as port:
        _prepare(room, initdb, "-D", f"{room}/data", "-U", "metaq", "-A", "trust")
        command = [postgres, "-D", f"{room}/data", "-p", str(port), "-k", str(room)]
        command += ["-c", "listen_addresses=127.0.0.1", "-c", "fsync=off"]
        command += ["-c", "max_prepared_transactions=10"]
        url = f"postgresql+psycopg://metaq@127.0.0.1:{port}/postgres"
        yield from _run(DatabaseServer(room, url, command, signal.SIGINT))


@contextlib.contextmanager
def mariadb() -> Iterator[DatabaseServer]:
    """Run a MariaDB inside the block."""
    install, daemon = (
        program(name, "mariadb-server") for name in ("mariadb-install-db", "mariadbd")
    )
    _need_driver("pymysql")
    with _room() as room, reserved_port() as port:
        options = ["--no-defaults", f"--datadir={room}/data"]
        method = "--auth-root-authentication-method=normal"
        _prepare(room, install, *options, method)
        command = [daemon, *options, f"--port={port}", f"--socket={room}/socket"]
        command += ["--bind-address=127.0.0.1", f"--pid-file={room}/pid"]
        url = f"mysql+pymysql://root@127.0.0.1:{port}/test"
        yield from _run(DatabaseServer(room, url, command, signal.SIGTERM))


def _need_driver(name: str) -> None:
    try:
        importlib.import_module(name)
    except ImportError:
        pytest.skip(f"no driver {name} here: install the extra `dev`")


def _run(server: DatabaseServer) -> Iterator[DatabaseServer]:
    try:
        server.start()
        yield server
    finally:
        server.end()
