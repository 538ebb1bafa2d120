"""Updates of a declared pipeline, one after another, on one Spark.

Spark Declarative Pipelines have one kind of run: an *update*, in which every flow
processes the data that exist at its start, in the order of the graph. So a continuous
pipeline is a loop of updates. Each has its own Spark Connect session, because a graph
allows one update, and the server drops its state with the session. Definitions are read
again for each update, so that the next one has added tables.

The formats are found by name and not registered: Spark sends the counters of registered
formats to the client, and the client of 4.3 fails on them.

Importing this needs PySpark 4.1 with Spark Connect: see `require_declarative`.
"""

import json
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any, Final

from pyspark.errors import PySparkException, PySparkValueError
from pyspark.pipelines.cli import (
    PipelineSpec,
    find_pipeline_spec,
    load_pipeline_spec,
    register_definitions,
)
from pyspark.pipelines.spark_connect_graph_element_registry import (
    SparkConnectGraphElementRegistry,
)
from pyspark.pipelines.spark_connect_pipeline import create_dataflow_graph, start_run
from pyspark.sql import SparkSession
from pyspark.sql.connect.client.retries import DefaultPolicy
from pyspark.sql.connect.session import SparkSession as ConnectSession
from pyspark.sql.connect.streaming.query import (
    StreamingQueryListenerBus,
    StreamingQueryManager,
)
from pyspark.sql.streaming.listener import (
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from metaq.errors import ConfigError
from metaq.pipeline.declared.progress import BatchProgress, batch_of
from metaq.pipeline.errors import JobError
from metaq.pipeline.installed import CONNECT
from metaq.pipeline.jobs.session import end_java, job_session, run_apart, sentence_of

CONNECT_MODE: Final = "SPARK_CONNECT_MODE_ENABLED"
"""Environment variable by which PySpark's functions use Spark Connect."""
RETRIES_MAX: Final = 4
"""Maximum number of retries of a call to our own server, which never comes back."""
RETRY_MS_MAX: Final = 1_000

FAILED: Final = " has FAILED"
"""Part of the text of an event about a failed flow."""
COMPLETED: Final = "Run is COMPLETED"
"""Text of the event that ends a successful update."""
UNKNOWN: Final = "UNKNOWN_RESPONSE"


@dataclass(frozen=True, slots=True)
class Project:
    """A pipeline's specification and its path."""

    spec_path: Path
    spec: PipelineSpec


def read_project(directory: Path) -> Project:
    """Read the specification of a project.

    Raises:
        PySparkException: it is invalid, or is neither in the directory nor above it.
    """
    path = find_pipeline_spec(directory.resolve())
    return Project(path, load_pipeline_spec(path))


CONNECT_SETTINGS: Final = {
    "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
    "spark.connect.grpc.binding.address": "127.0.0.1",
    "spark.connect.grpc.binding.port": "0",
}
"""Settings of a Spark that serves Spark Connect, only on this machine."""


def catalog_settings(directory: Path) -> dict[str, str]:
    """Return settings for a catalog on disk; Spark's default one ends with its process.

    Args:
        directory: of the project; stores tables and catalog.
    """
    metastore = directory.resolve() / "metastore"
    return {
        "spark.sql.catalogImplementation": "hive",
        "spark.sql.warehouse.dir": str(directory.resolve() / "tables"),
        "spark.hadoop.javax.jdo.option.ConnectionURL": (
            f"jdbc:derby:;databaseName={metastore};create=true"
        ),
        "spark.driver.extraJavaOptions": "-Dderby.stream.error.file=/dev/null",
    }


@contextmanager
def connect_mode() -> Iterator[None]:
    """Have the functions of PySpark use Spark Connect inside the block."""
    before = os.environ.get(CONNECT_MODE)
    os.environ[CONNECT_MODE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[CONNECT_MODE]
        else:
            os.environ[CONNECT_MODE] = before


def server_url(session: SparkSession) -> str:
    """Return the address of Spark Connect in a session with `CONNECT_SETTINGS`."""
    # The only way to find a port chosen by the system; PySpark does the same.
    service = "org.apache.spark.sql.connect.service.SparkConnectService$"
    port = getattr(getattr(session._jvm, service), "MODULE$").localPort()  # noqa: SLF001  # as above
    return f"sc://localhost:{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refresh:
    """Tables that an update recomputes from the start."""

    tables: Sequence[str] = ()
    is_all: bool = False


def run_updates(
    url: str,
    project: Project,
    *,
    is_own: bool,
    refresh: Refresh,
    interval_s: float | None,
    on_batch: Callable[[BatchProgress], None],
    on_failure: Callable[[str], None],
    on_update: Callable[[], None],
) -> None:
    """Run updates of a project, until a signal, or only one.

    Args:
        url: address of Spark Connect.
        project: the pipeline.
        is_own: whether the server was started by this process, and never comes back.
        refresh: tables that the first update recomputes.
        interval_s: pause after each update, seconds; None for only one update.
        on_batch: called with each micro-batch, in a thread of Spark's client.
        on_failure: called with one sentence for each failure of a flow; Spark retries
            the flow before the update fails.
        on_update: called after each update.

    Raises:
        PySparkException: an update failed.
        KeyboardInterrupt, SystemExit: a second signal.
    """
    work = _PipelineRun(url, project, on_batch, on_failure, is_own)
    run_apart(lambda: work.run(refresh, interval_s, on_update), on_interrupt=work.stop)


class ListenerBus(StreamingQueryListenerBus):
    """Reports the events of a session to one listener. Used by one thread.

    The bus of the session itself holds its lock in `remove` until the thread of events
    has ended, and that thread needs the lock for each event: if one arrives in that
    moment, both wait for ever. With one user there is nothing to lock.
    """

    def __init__(self, streams: StreamingQueryManager) -> None:
        """Start without a listener; `append` begins to report."""
        super().__init__(streams)
        self._lock = nullcontext()  # type: ignore[assignment]  # see above


@dataclass(eq=False)
class _PipelineRun(StreamingQueryListener):
    """Updates of one project. One thread calls `run`, another one may call `stop`."""

    _url: str
    _project: Project
    _on_batch: Callable[[BatchProgress], None]
    _on_failure: Callable[[str], None]
    _is_own: bool
    _stopped: threading.Event = field(default_factory=threading.Event)
    _session: Any = None

    def run(
        self, refresh: Refresh, interval_s: float | None, on_update: Callable[[], None]
    ) -> None:
        """Run updates until `stop` is called."""
        while not self._stopped.is_set():
            try:
                self._update(refresh)
            except PySparkException:
                if self._stopped.is_set():
                    return
                raise
            on_update()
            refresh = Refresh()
            if interval_s is None or self._stopped.wait(interval_s):
                return

    def stop(self) -> None:
        """Have `run` return; interrupts an update in progress."""
        self._stopped.set()
        self._interrupt()

    def _interrupt(self) -> None:
        session = self._session
        if session is not None:
            with suppress(PySparkException):
                session.interruptAll()

    def _update(self, refresh: Refresh) -> None:
        spec = self._project.spec
        with self._connected(spec.configuration) as session:
            graph = create_dataflow_graph(
                session,
                default_catalog=spec.catalog,
                default_database=spec.database,
                sql_conf=spec.configuration,
            )
            registry = SparkConnectGraphElementRegistry(session, graph)
            # It prints the names of the files that it reads.
            with redirect_stdout(StringIO()):
                register_definitions(
                    self._project.spec_path, registry, spec, session, graph
                )
            events = start_run(
                session,
                graph,
                full_refresh=refresh.tables,
                full_refresh_all=refresh.is_all,
                refresh=(),
                dry=False,
                storage=spec.storage,
            )
            self._follow(events)

    def _follow(self, events: Iterator[Mapping[str, Any]]) -> None:
        """Follow an update to its end; `events` raises its error.

        After Python functions have run, the client of 4.3 fails on their counters, the
        last result; that error is ignored if the update is complete.
        """
        text = ""
        try:
            for result in events:
                event = result.get("pipeline_event_result")
                text = "" if event is None else event.event.message
                if self._stopped.is_set():
                    # The update was about to begin when `stop` was called.
                    self._interrupt()
                if FAILED in text:
                    what, _, cause = text.partition("\n")
                    sentence = sentence_of(JobError(cause.removeprefix("Error: ")))
                    self._on_failure(f"{what} {sentence}")
        except PySparkValueError as error:
            if error.getCondition() != UNKNOWN or COMPLETED not in text:
                raise

    @contextmanager
    def _connected(self, configuration: Mapping[str, str]) -> Iterator[Any]:
        builder = ConnectSession.builder.remote(self._url)
        for name, value in configuration.items():
            builder = builder.config(name, value)
        session = builder.create()
        if self._is_own:
            policy = DefaultPolicy(max_retries=RETRIES_MAX, max_backoff=RETRY_MS_MAX)
            session.client.set_retry_policies([policy])
        self._session, bus = session, ListenerBus(session.streams)
        try:
            bus.append(self)
            yield session
        finally:
            self._session = None
            # The thread of events is None when it has just ended by an error.
            with suppress(PySparkException, AttributeError):
                bus.remove(self)
            session.stop()

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802  # Spark's name
        """Ignore the event."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802  # Spark's name
        """Report the progress."""
        try:
            self._on_batch(batch_of(json.loads(event.progress.json)))
        except Exception as error:
            # Reported here, because Spark's client drops it silently.
            self._on_failure(f"progress of a flow is not known: {error}")
            raise

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802  # Spark's name
        """Ignore the event."""


GATEWAY: Final = "PYSPARK_GATEWAY_PORT"
"""Environment variable in which `spark-submit` names a running Java: that has no token
of ours, and does not end with this process."""
TOKEN: Final = "SPARK_CONNECT_AUTHENTICATE_TOKEN"  # noqa: S105  # its name
"""Environment variable with the token shared by our own Spark and its client, so that
other users of this machine cannot run code in it."""


@contextmanager
def connect_server(
    master: str, settings: Mapping[str, str], log: Path | None, directory: Path
) -> Iterator[str]:
    """Yield the address of Spark Connect: of a running server, or of our own.

    Args:
        master: URL of a Spark cluster, or the address of a server.
        settings: Spark settings, for our own server.
        log: file for its log, or None.
        directory: of the project; stores tables and catalog of our own server.

    Raises:
        ConfigError: this process was started by `spark-submit`.
        MetaqError: Spark does not start.
    """
    if master.startswith(CONNECT):
        with connect_mode():
            yield master
        return
    if GATEWAY in os.environ:
        raise ConfigError(
            "a declared pipeline starts a Java of its own: run this command by itself,"
            " not by spark-submit"
        )
    os.environ.setdefault(TOKEN, secrets.token_hex())
    # For the Python processes of the driver, even if executors use another one.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = {**CONNECT_SETTINGS, **catalog_settings(directory), **settings}
    try:
        with job_session(master, settings, log) as session, connect_mode():
            yield server_url(session.spark)
    finally:
        end_java()
