"""`metaq broker` and `metaq local`: run a broker; `local` also runs ZooKeeper.

`local` keeps everything in one data directory:

    <data>/<topic>-<partition>/   partition logs: the data directory of the broker
    <data>/local/zookeeper/       ZooKeeper: settings, log, data
    <data>/local/.lock            held while `metaq local` runs there
    <data>/local/port             last port of the broker
    <data>/local/replica-K/       data directory of replica K of a set, 2 and above

ZooKeeper is a child process, which the kernel kills when this process ends for any
reason. It is started first and stopped last.

With port 0 the broker uses its last port again if that is free. Its registration
outlives a kill until the session times out; with the same address the broker recognises
it as its own and replaces it at once.

NB: `metaq.broker.process` is imported inside the functions that run a broker, because
the import takes a tenth of a second and no other command needs it.
"""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from metaq.cli import logs, render
from metaq.cli.local_set import LocalReplica, LocalSet
from metaq.cli.options import (
    FILE,
    declared,
    default_data_dir,
    option,
    pairs_option,
    read_bytes,
    takes,
)
from metaq.cli.tree import command
from metaq.config.load import load_config
from metaq.config.settings import BrokerConfig
from metaq.errors import ConfigError, MetaqError
from metaq.fs import DIRECTORY_MODE, SystemFileSystem
from metaq.replication.record import REPLICA_MAX
from metaq.zk.embedded import EmbeddedZooKeeper, EmbeddedZooKeeperError, free_port
from metaq.zk.registry import RegistrationState

if TYPE_CHECKING:
    from metaq.broker.app import Broker

LOOPBACK: Final = "127.0.0.1"
LOCAL: Final = "local"
"""Directory beside the partition directories, whose names all contain '-'."""
PORT: Final = 8123
ZOOKEEPER_PORT: Final = 2181
PORT_MAX: Final = 65535
PORT_FILE: Final = "port"
SESSION_TIMEOUT_MS: Final = 4_000
"""After kill -9, a broker on another port waits until its old session expires."""
SYNC_TIME_MS: Final = 200
"""Wait between withdrawing and closing the port; short for clients on this machine."""
LOOK_S: Final = 0.1
"""Interval at which an incomplete registration is checked, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions:
    """The options of `metaq local`."""

    data_dir: Path | None = option(
        "--data-dir",
        type=click.Path(file_okay=False, path_type=Path),
        help="Directory for all data.  [default: metaq in the user's data directory]",
    )
    port: int = option(
        "--port",
        type=click.IntRange(0, PORT_MAX),
        default=PORT,
        show_default=True,
        help="Port of the broker, or of its first replica; 0 selects a free port.",
    )
    zookeeper_port: int = option(
        "--zk-port",
        type=click.IntRange(0, PORT_MAX),
        default=ZOOKEEPER_PORT,
        show_default=True,
        help="Port of ZooKeeper; 0 selects a free port.",
    )
    settings: dict[str, str] = declared(
        pairs_option("--set", "settings", "Override a key of server.ini")
    )
    topics: tuple[str, ...] = option(
        "--topic",
        multiple=True,
        metavar="NAME[=PARTITIONS]",
        help="Add a topic; may be repeated.",
    )
    replica_count: int = option(
        "--replicas",
        type=click.IntRange(1, REPLICA_MAX),
        default=1,
        show_default=True,
        help="Number of replicas of the broker: processes that each have all data.",
    )


@command(
    "broker",
    click.option(
        "--config",
        "path",
        required=True,
        type=FILE,
        help="Configuration file of the broker, in MetaQ's format.",
    ),
    pairs_option(
        "--set",
        "settings",
        "Override a key of the file, or with TOPIC:KEY=VALUE of one topic",
    ),
    examples=(
        "metaq broker --config config/server.ini",
        "metaq broker --config server.ini --set serverPort=9123 --set brokerId=1",
    ),
)
def serve_broker(path: Path, settings: dict[str, str]) -> None:
    """Run a broker in the foreground until SIGTERM or Ctrl-C.

    SIGHUP reloads the configuration file.
    """
    # Ignored until the broker has its handler: the settings are read now anyway.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    config = load_config(str(path), read_bytes, settings)
    logs.show(logging.INFO)
    from metaq.broker.process import run_broker  # noqa: PLC0415  # see the top

    asyncio.run(run_broker(config, overrides=settings))


@command(
    "local",
    takes(LocalOptions),
    examples=(
        "metaq local",
        "metaq local --port 0 --zk-port 0 --data-dir ./data --topic orders=4",
        "metaq local --set unflushThreshold=1000",
        "metaq local --replicas 3",
    ),
)
def serve_local(options: LocalOptions) -> None:
    """Run ZooKeeper and a broker on this machine, for local clients.

    Prints one line when both are ready; with several replicas, a further line for each,
    and again after one was restarted. Logs go to standard error, those of ZooKeeper to
    local/zookeeper in the data directory. Ends on SIGTERM or Ctrl-C.
    """
    data_dir = (options.data_dir or default_data_dir()).absolute()
    # Report mistakes in settings before anything is started or created.
    config = local_config(options, data_dir, f"{LOOPBACK}:{options.zookeeper_port}")
    if options.data_dir is None:
        render.say(f"data is kept in {data_dir}")
    logs.show(logging.INFO)
    _make_directories(data_dir)
    Path(config.system.data_path).parent.mkdir(parents=True, exist_ok=True)
    lock = SystemFileSystem().lock_directory(data_dir / LOCAL)
    # Until the broker has its handlers, SIGHUP is ignored, and SIGTERM unwinds what was
    # started.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(0))
    try:
        if options.port == 0 and options.replica_count == 1:
            options = replace(options, port=last_port(data_dir / LOCAL / PORT_FILE))
        with local_zookeeper(options, config, data_dir) as (connect, server):
            if options.replica_count > 1:
                _run_set(options, data_dir, connect, server)
                return
            config = local_config(options, data_dir, connect)
            overrides = _overrides(options, data_dir, connect)
            with _naming_another("--port", options.port):
                _run(config, overrides, data_dir / LOCAL / PORT_FILE, server)
    finally:
        lock.release()


@contextlib.contextmanager
def _naming_another(option: str, port: int) -> Iterator[None]:
    """If a port is in use, name the option to choose another in the error."""
    try:
        yield
    except MetaqError as error:
        cause = error.__cause__
        is_taken = isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE
        if not is_taken or f":{port}: " not in str(error):
            raise
        raise type(error)(f"{error}; choose another with {option}") from cause


def _run(
    config: BrokerConfig,
    overrides: Mapping[str, str],
    memory: Path,
    server: EmbeddedZooKeeper | None,
) -> None:
    from metaq.broker.process import run_broker  # noqa: PLC0415  # see the top

    zookeeper = config.zookeeper

    def on_ready(broker: "Broker") -> None:
        if server is not None:
            _end_with(server)
        with contextlib.suppress(OSError):
            memory.write_text(f"{broker.port}\n")
        connect = zookeeper.connect if zookeeper.is_enabled else "none"
        line = (
            f"ready broker={broker.address} zookeeper={connect}"
            f" data={config.system.data_path}"
        )
        problem = _registration_problem(broker)
        if problem:
            render.say(
                f"not ready: the broker is not registered in ZooKeeper at {connect}:"
                f" {problem}; retrying"
            )
        _print_when_registered(broker, line)

    asyncio.run(run_broker(config, overrides=overrides, on_ready=on_ready))
    if server is not None and not server.is_running:
        raise EmbeddedZooKeeperError(
            f"ZooKeeper ended by itself; its log is in {server.data_dir}"
        )


def _run_set(
    options: LocalOptions,
    data_dir: Path,
    connect: str,
    server: EmbeddedZooKeeper | None,
) -> None:
    """Run a set; the data directory of replica 1 is that of a single broker."""
    replicas, ports = [], set[int]()
    for number in range(1, options.replica_count + 1):
        local = data_dir / LOCAL
        own = data_dir if number == 1 else local / f"replica-{number}"
        memory = local / (PORT_FILE if number == 1 else f"{PORT_FILE}-{number}")
        # A restarted replica keeps its address.
        port = options.port + number - 1 if options.port else last_port(memory)
        while not port or port in ports:
            port = free_port()
        ports.add(port)
        with contextlib.suppress(OSError):
            memory.write_text(f"{port}\n")
        overrides = _overrides(replace(options, port=port), own, connect)
        overrides["replicaId"] = str(number)
        replicas.append(LocalReplica(number, installed_settings(), overrides))

    async def run() -> None:
        if server is not None:
            _end_with(server)
        await LocalSet(replicas).run()

    asyncio.run(run())


def _registration_problem(broker: "Broker") -> str:
    """Return why clients cannot find a broker; "" if they can, or without ZooKeeper."""
    found = broker.control.status().registration
    if found is None or found.state is RegistrationState.REGISTERED:
        return ""
    return found.last_error or found.state.value


def _print_when_registered(broker: "Broker", line: str) -> None:
    if _registration_problem(broker):
        loop = asyncio.get_running_loop()
        loop.call_later(LOOK_S, _print_when_registered, broker, line)
        return
    click.echo(line)
    sys.stdout.flush()


def _end_with(server: EmbeddedZooKeeper) -> None:
    """Stop cleanly when ZooKeeper ends, because clients could not find the broker."""
    if server.pid is None:
        os.kill(os.getpid(), signal.SIGTERM)
        return
    watched = os.pidfd_open(server.pid)
    loop = asyncio.get_running_loop()

    def on_end() -> None:
        loop.remove_reader(watched)
        os.close(watched)
        os.kill(os.getpid(), signal.SIGTERM)

    loop.add_reader(watched, on_end)


@contextlib.contextmanager
def local_zookeeper(
    options: LocalOptions, config: BrokerConfig, data_dir: Path
) -> Iterator[tuple[str, EmbeddedZooKeeper | None]]:
    """Yield ZooKeeper's address, and our server unless the settings name another."""
    if not config.zookeeper.is_enabled or "zk.zkConnect" in options.settings:
        yield config.zookeeper.connect, None
        return
    directory = data_dir / LOCAL / "zookeeper"
    server = EmbeddedZooKeeper(directory, port=options.zookeeper_port)
    try:
        with _naming_another("--zk-port", options.zookeeper_port):
            server.start()
    except EmbeddedZooKeeperError as error:
        # The message ends with an excerpt of its log; the first line is enough here.
        reason, *log = str(error).split("\n")
        where = f"; its log is in {directory}" if log else ""
        raise EmbeddedZooKeeperError(reason + where) from error
    try:
        yield server.address, server
    finally:
        server.stop()


def last_port(memory: Path) -> int:
    """Return the port of the last run if it is free, else 0."""
    try:
        port = int(memory.read_text(encoding="ascii"))
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
    except (OSError, ValueError, OverflowError):
        return 0
    return port


def local_config(options: LocalOptions, data_dir: Path, connect: str) -> BrokerConfig:
    """Return the installed settings with the overrides of `metaq local`."""
    settings = installed_settings()
    overrides = _overrides(options, data_dir, connect)
    return load_config(str(settings), read_bytes, overrides)


def _overrides(options: LocalOptions, data_dir: Path, connect: str) -> dict[str, str]:
    return {
        "hostName": LOOPBACK,
        "serverPort": str(options.port),
        "dataPath": str(data_dir),
        "zk.zkConnect": connect,
        "zk.zkSessionTimeoutMs": str(SESSION_TIMEOUT_MS),
        "zk.zkSyncTimeMs": str(SYNC_TIME_MS),
        **parse_topics(options.topics),
        # The user's settings come last, so they take precedence.
        **options.settings,
    }


def parse_topics(topics: tuple[str, ...]) -> dict[str, str]:
    """Return the overrides for values `NAME[=PARTITIONS]` of `--topic`."""
    overrides = {}
    for text in topics:
        name, equals, count = text.partition("=")
        if not name or (equals and not count.isdecimal()):
            raise click.BadParameter(
                f"expected NAME or NAME=PARTITIONS, got '{text}'", param_hint="--topic"
            )
        overrides[f"{name}:numPartitions"] = count
    return overrides


def _make_directories(data_dir: Path) -> None:
    local = data_dir / LOCAL
    try:
        data_dir.parent.mkdir(parents=True, exist_ok=True)
        for path in (data_dir, local):
            path.mkdir(DIRECTORY_MODE, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot create the data directory {local}: {error.strerror}"
        ) from error


def installed_settings() -> Path:
    """Return the path of the package's `server.ini`.

    In a wheel it is inside the package, in a checkout `config/server.ini`.
    """
    package = Path(str(resources.files("metaq")))
    candidates = (package / "server.ini", package.parent / "config" / "server.ini")
    for path in candidates:
        if path.is_file():
            return path
    raise ConfigError(f"server.ini is missing: expected {candidates[0]}")
