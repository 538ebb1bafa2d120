"""Updates of a declared pipeline, one after the other, on one Spark.

Spark Declarative Pipelines know one kind of run: an *update*, in which every flow
processes what is there at its start, in the order of the graph. So a pipeline that goes
on is a loop of updates. Each has a session of Spark Connect of its own: a graph takes
one update, and everything that the server keeps of it goes with its session. Its
definitions are read again each time: a table that is added comes with the next one.

The formats are found by their names here and not registered: Spark sends the counters
of registered formats to the client, and the client of 4.3 ends an update on them.

Importing this takes PySpark 4.1 with Spark Connect: see `require_declarative`.
"""

import json
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
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
"""Variable that makes PySpark's functions those of Spark Connect, in this process."""
RETRIES_MAX: Final = 4
"""Times that a call to a server of this machine is made again: it is there or gone."""
RETRY_MS_MAX: Final = 1_000

FAILED: Final = " has FAILED"
"""Part of the text of an event about a flow that failed."""
COMPLETED: Final = "Run is COMPLETED"
"""The text of the event that ends an update well."""
UNKNOWN: Final = "UNKNOWN_RESPONSE"


@dataclass(frozen=True, slots=True)
class Project:
    """A pipeline's directory."""

    spec_path: Path
    spec: PipelineSpec


def read_project(directory: Path) -> Project:
    """Read the specification of a project.

    Raises:
        PySparkException: there is none in the directory or above it, or a wrong one.
    """
    path = find_pipeline_spec(directory.resolve())
    return Project(path, load_pipeline_spec(path))


CONNECT_SETTINGS: Final = {
    "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
    "spark.connect.grpc.binding.address": "127.0.0.1",
    "spark.connect.grpc.binding.port": "0",
}
"""Settings of a Spark that serves Spark Connect, to this machine alone."""


def catalog_settings(directory: Path) -> dict[str, str]:
    """Return settings by which tables outlive the Spark that made them.

    The catalog that Spark has by default ends with its process.

    Args:
        directory: of the project; tables and catalog are kept in it.
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
    """Have the functions of PySpark speak Spark Connect in the block."""
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
    # A port that the system has chosen is known nowhere else; PySpark asks so as well.
    service = "org.apache.spark.sql.connect.service.SparkConnectService$"
    port = getattr(getattr(session._jvm, service), "MODULE$").localPort()  # noqa: SLF001  # as above
    return f"sc://localhost:{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refresh:
    """Tables that an update computes from the start."""

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
    """Make updates of a project until a signal comes, or one alone.

    Args:
        url: address of Spark Connect.
        project: the pipeline.
        is_own: the server is this process' own, and does not come back once gone.
        refresh: of the first update.
        interval_s: pause after each update, seconds; None: there is one alone.
        on_batch: called with each micro-batch, in a thread of Spark's client.
        on_failure: called with one sentence for each flow that failed; Spark runs it
            again before the update fails.
        on_update: called after each update.

    Raises:
        PySparkException: an update failed.
        KeyboardInterrupt, SystemExit: a second signal.
    """
    work = _PipelineRun(url, project, on_batch, on_failure, is_own)
    run_apart(lambda: work.run(refresh, interval_s, on_update), on_interrupt=work.stop)


@dataclass(eq=False)
class _PipelineRun(StreamingQueryListener):
    """Updates of one project. One thread runs it, another one may stop it."""

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
        """Make updates until `stop` is called."""
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
        """Have `run` return; an update that is under way is broken off."""
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
            # It prints which files it reads.
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
        """Wait for the end of an update; its error is raised at the end of the events.

        Where Python functions ran, the client of 4.3 fails on their counters, which
        come last.
        """
        text = ""
        try:
            for result in events:
                event = result.get("pipeline_event_result")
                text = "" if event is None else event.event.message
                if self._stopped.is_set():
                    # It was about to begin when `stop` was called.
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
        self._session = session
        try:
            session.streams.addListener(self)
            yield session
        finally:
            self._session = None
            with suppress(PySparkException):
                session.streams.removeListener(self)
            session.stop()

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802  # Spark's name
        """Take no notice."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802  # Spark's name
        """Hand the progress on."""
        try:
            self._on_batch(batch_of(json.loads(event.progress.json)))
        except Exception as error:
            # Spark's client drops it without a word.
            self._on_failure(f"progress of a flow is not known: {error}")
            raise

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802  # Spark's name
        """Take no notice."""


GATEWAY: Final = "PYSPARK_GATEWAY_PORT"
"""Variable by which `spark-submit` names a Java that runs already: it has no token of
ours, and does not end with us."""
TOKEN: Final = "SPARK_CONNECT_AUTHENTICATE_TOKEN"  # noqa: S105  # its name
"""Variable by which a Spark of ours and its client know each other: others on this
machine may not run code as us."""


@contextmanager
def connect_server(
    master: str, settings: Mapping[str, str], log: Path | None, directory: Path
) -> Iterator[str]:
    """Yield the address of Spark Connect: of a server that runs, or of our own.

    Args:
        master: URL of a Spark cluster, or the address of a server.
        settings: Spark's, for a server of our own.
        log: file for its log, or None.
        directory: of the project; tables and catalog are kept in it.

    Raises:
        ConfigError: this process has a Java of others.
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
    # Of the driver's own Python processes, also where executors are others.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = {**CONNECT_SETTINGS, **catalog_settings(directory), **settings}
    try:
        with job_session(master, settings, log) as session, connect_mode():
            yield server_url(session.spark)
    finally:
        end_java()
