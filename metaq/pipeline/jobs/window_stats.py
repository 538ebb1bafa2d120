"""Statistics of topics over time windows: messages, bytes, end-to-end delay."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from metaq.model import Millis
from metaq.pipeline.errors import JobError
from metaq.pipeline.jobs.session import job_errors, run_apart
from metaq.spark.errors import OptionError
from metaq.spark.options import SourceOptions

WINDOW_S: Final = 60
WINDOW_S_MAX: Final = 10**9
"""Maximum window: about thirty years."""
WINDOWS_MAX: Final = 100_000
"""Maximum number of windows, which are all in the driver's memory."""
_US_PER_S: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class WindowStats:
    """One window of one topic."""

    topic: str
    start_ms: Millis | None
    """Start of the window of timestamps; None for messages without a timestamp."""
    message_count: int
    size_bytes: int
    """Bytes of the values."""
    delay_mean_s: float | None
    """Mean delay in seconds; None if no message has a start time."""
    delay_max_s: float | None


def stats(
    spark: SparkSession,
    options: Mapping[str, str],
    *,
    window_s: int = WINDOW_S,
    since: str = "timestamp",
) -> tuple[WindowStats, ...]:
    """Return the windows over the current messages, by topic and time.

    Args:
        spark: the session.
        options: of a batch read with `format("metaq")`.
        window_s: length of a window in seconds, 1..WINDOW_S_MAX.
        since: SQL expression for the time at which a message's delay begins, by default
            the broker's timestamp; it ends when this job reads the message.

    Raises:
        JobError: reading failed, or there are too many windows.
        OptionError: an option is wrong.
    """
    _check_window(window_s)
    SourceOptions.from_map(options, is_stream=False)
    with job_errors("stats"):
        rows = spark.read.format("metaq").options(**options).load()
        return collect_windows(rows, window_s=window_s, since=since)


def follow_stats(
    spark: SparkSession,
    options: Mapping[str, str],
    on_windows: Callable[[tuple[WindowStats, ...]], None],
    *,
    interval_s: float,
    window_s: int = WINDOW_S,
    since: str = "timestamp",
) -> None:
    """Report new messages, batch by batch, until Ctrl-C or the query is stopped.

    Args:
        spark: the session.
        options: of a streaming read with `format("metaq")`.
        on_windows: called on the driver with what one batch adds to windows; not called
            for a batch without messages.
        interval_s: seconds between batches, above 0.
        window_s: as for `stats`.
        since: as for `stats`.

    Raises:
        JobError: reading failed.
        OptionError: an option is wrong.
        Exception: raised by `on_windows`, which ends the query.
    """
    failures: list[Exception] = []

    def report(batch: DataFrame, _number: int) -> None:
        try:
            if found := collect_windows(batch, window_s=window_s, since=since):
                on_windows(found)
        except Exception as error:
            # Kept, because Spark passes on only its text.
            failures.append(error)
            raise

    _check_window(window_s)
    SourceOptions.from_map(options, is_stream=True)
    with job_errors("stats"):
        rows = spark.readStream.format("metaq").options(**options).load()
        trigger = f"{round(interval_s * 1000)} milliseconds"
        stream = rows.writeStream.foreachBatch(report).trigger(processingTime=trigger)
        query = stream.start()
        try:
            run_apart(query.awaitTermination)
        except KeyboardInterrupt:
            return
        except Exception:
            if failures:
                raise failures[0] from None
            raise
        finally:
            query.stop()


def collect_windows(
    rows: DataFrame, *, window_s: int, since: str
) -> tuple[WindowStats, ...]:
    """Return the windows of rows of the source; see `stats`.

    Raises:
        JobError: there are more than `WINDOWS_MAX`.
    """
    window_us = window_s * _US_PER_S
    micros = sf.unix_micros("timestamp")
    start_ms = (micros - micros % window_us) / 1000
    set_out = sf.unix_micros(sf.expr(since).cast("timestamp"))
    delay = sf.unix_micros(sf.current_timestamp()) - set_out
    keys = rows.select(
        "topic",
        start_ms.cast("bigint").alias("start_ms"),
        sf.octet_length("value").alias("size"),
        sf.greatest(delay, sf.lit(0)).alias("delay"),
    )
    found = keys.groupBy("topic", "start_ms").agg(
        sf.count(sf.lit(1)).alias("messages"),
        sf.sum("size").alias("bytes"),
        sf.mean("delay").alias("mean"),
        sf.max("delay").alias("max"),
    )
    windows = found.orderBy("topic", "start_ms").limit(WINDOWS_MAX + 1).collect()
    if len(windows) > WINDOWS_MAX:
        raise JobError(
            f"stats: more than {WINDOWS_MAX} windows of {window_s} s: ask for longer"
            " ones or for fewer topics"
        )
    return tuple(map(_to_stats, windows))


def _check_window(window_s: int) -> None:
    if not 1 <= window_s <= WINDOW_S_MAX:
        raise OptionError(f"window: expected 1..{WINDOW_S_MAX} seconds, got {window_s}")


def _to_stats(row: Any) -> WindowStats:
    return WindowStats(
        row["topic"],
        None if row["start_ms"] is None else Millis(row["start_ms"]),
        row["messages"],
        row["bytes"] or 0,
        None if row["mean"] is None else row["mean"] / _US_PER_S,
        None if row["max"] is None else row["max"] / _US_PER_S,
    )
