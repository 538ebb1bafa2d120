"""Snapshots of the logs for retention, the scrub and the record of a directory.

Retention leaves stopped logs alone: no segment of one may be removed before an operator
has seen the damage. The scrub reads them too, because there may be more damage. For a
log that follows, only segments that its leader has removed are removed; for a log of
the broker's own, only those that its owner does not need.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from typing import Final

from metaq.config.settings import BrokerConfig, DeleteKind
from metaq.model import LogId, is_internal
from metaq.storage.holdings import Extent, Holdings
from metaq.storage.key_builder import KeyLog
from metaq.storage.key_index import field_names
from metaq.storage.log_dir import LogDir
from metaq.storage.log_state import LogState
from metaq.storage.partition_log import PartitionLog
from metaq.storage.retention_run import DirectorySnapshot, LogSnapshot
from metaq.storage.scrub import ScrubTarget

_FOR_EVER_MS: Final = 2**62
"""Greater than any age: such segments are removed by size only."""

_SCRUBBED: Final = frozenset({LogState.OPEN, LogState.STOPPED, LogState.FOLLOWING})

_INDEXED: Final = frozenset({LogState.OPEN, LogState.FOLLOWING})

_AT_ONCE_MS: Final = -(2**70)
"""Smaller than any age: such segments are removed at once."""

_KEEPING: Final = frozenset({LogState.STOPPED, LogState.OFFLINE, LogState.REOPENING})
"""States in which no segment may be removed: damaged, or files are being changed."""


def take_directory_snapshot(
    directory: LogDir,
    logs: Iterable[PartitionLog],
    config: BrokerConfig,
    topics: Collection[str],
) -> DirectorySnapshot:
    """Return the snapshot of a data directory for a run of retention.

    Args:
        directory: the directory; taken offline after a disk error.
        logs: the logs in it.
        config: limits and topic policies.
        topics: topics whose segments may be removed by age; segments of all topics may
            be removed by size.
    """
    snapshots = []
    for log in logs:
        policy = config.topic(log.log_id.topic).delete_policy
        sealed, active = log.segments.settled(log.high_watermark), log.readable_active()
        keeping = _KEEPING
        if is_internal(log.log_id.topic):
            policy = replace(policy, kind=DeleteKind.DELETE, age_ms=_AT_ONCE_MS)
            sealed = tuple(s for s in sealed if s.end_offset <= log.trims_to)
        elif log.state is LogState.FOLLOWING:
            policy = replace(policy, age_ms=_AT_ONCE_MS)
            sealed = tuple(s for s in sealed if s.end_offset <= log.leader_start)
        elif log.state is LogState.OPEN:
            keeping |= {LogState.FOLLOWING}
            if log.log_id.topic not in topics:
                policy = replace(policy, age_ms=_FOR_EVER_MS)
        else:
            continue
        stopped = partial(_is_stopped, log, keeping)
        snapshots.append(
            LogSnapshot(log.log_id, log.on_removed, sealed, active, policy, stopped)
        )
    return DirectorySnapshot(
        directory.path,
        tuple(snapshots),
        config.limits.log_bytes_max,
        config.limits.data_dir_bytes_max,
        directory.take_offline,
    )


def is_over_size_limit(logs: Iterable[PartitionLog], config: BrokerConfig) -> bool:
    """Return whether retention could make a log or data directory smaller."""
    # A log without a sealed segment can not become smaller.
    full = [log for log in logs if log.state is LogState.OPEN and len(log.segments) > 1]
    return any(
        0 < config.log_bytes_max_of(log.log_id.topic) < log.size_bytes
        or 0 < config.limits.data_dir_bytes_max < log.log_dir.size_bytes
        for log in full
    )


def sealed(
    record: Holdings, logs: Iterable[PartitionLog], *, is_exact: bool, is_replica: bool
) -> Holdings:
    """Return the last record of a directory whose logs are closed.

    Called on the storage thread, when the logs do not change any more. For a replica
    each log counts up to its high watermark only, because the rest may still be cut.
    """
    extents = {
        str(log.log_id): Extent(log.log_start_offset, end)
        for log in logs
        if not log.damage
        and (end := log.high_watermark if is_replica else log.writer.synced_end)
        and not (is_replica and end == log.log_start_offset)
    }
    return replace(
        record, is_sealed=is_exact, partitions={**record.partitions, **extents}
    )


def _is_stopped(log: PartitionLog, keeping: AbstractSet[LogState]) -> bool:
    return log.state in keeping


def key_logs(
    logs: Mapping[LogId, PartitionLog], config: BrokerConfig
) -> Iterator[KeyLog]:
    """Yield the logs of topics with an index of keys. Used on the loop's thread.

    Logs may come and go during the iteration; those of its beginning are yielded.
    """
    topics = {**config.defined, **config.topics}
    wanted = {
        name: field_names(topic.index) for name, topic in topics.items() if topic.index
    }
    for log_id, log in tuple(logs.items()) if wanted else ():
        names = wanted.get(log_id.topic)
        if names and log.state in _INDEXED:
            yield KeyLog(log_id, names, log.segments, log.high_watermark)


class ScrubbedLogs:
    """Snapshots of the logs for the scrub. Used on the loop's thread.

    Logs of offline directories are left out.
    """

    def __init__(self, logs: Mapping[LogId, PartitionLog]) -> None:
        """Use `logs`, a live view."""
        self._logs = logs

    def sizes(self) -> Mapping[LogId, int]:
        """Return the number of durable bytes of each log."""
        return {
            log_id: log.high_watermark - log.log_start_offset
            for log_id, log in self._logs.items()
            if log.state in _SCRUBBED
        }

    def targets(self, log_id: LogId) -> Sequence[ScrubTarget]:
        """Return the segments of a log that have durable bytes, oldest first."""
        log = self._logs.get(log_id)
        if log is None or log.state not in _SCRUBBED:
            return ()
        is_open = log.state is LogState.OPEN
        settled = log.segments.settled(log.high_watermark)
        targets = [
            ScrubTarget(log_id, each, True, may_write=is_open) for each in settled
        ]
        active = log.readable_active()
        if active.size_bytes:
            targets.append(ScrubTarget(log_id, active, False))
        if targets:
            targets[0] = replace(targets[0], is_first=True)
        return targets
