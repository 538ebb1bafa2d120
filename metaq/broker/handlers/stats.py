"""`stats` and `version`: the statistics of a broker, and its capabilities.

`version` is also the heartbeat (docs/metaq-1.4/broker.md 1.7). `stats` are text
snapshots with the lines of MetaQ (docs/metaq-1.4/broker.md 7.1). Every body except that
of `config` is between `STATS` and `END`. Lines that MetaQ does not have come last,
where its tools ignore them: `durability` explains what an acknowledgement means,
`closed_partitions` counts and names the closed ones, `set` shows settings that are not
in the file.

A broker may have thousands of logs, so their statistics are gathered in steps, with
other commands served in between; each log is shown as at its step.
"""

import os
import threading
from collections.abc import Generator, Iterable, Iterator
from typing import Final

from metaq.broker.context import BrokerContext
from metaq.broker.realtime import OPERATIONS
from metaq.config.settings import BrokerConfig, TopicConfig
from metaq.protocol.commands import Stats
from metaq.protocol.connection import LINE_BYTES_MAX
from metaq.protocol.version import SERVER_VERSION, Capabilities, encode_version_body
from metaq.storage.log_state import LogStatistics
from metaq.storage.partition_log import PartitionLog

TOLD_KEYS: Final = frozenset({"numPartitions", "acceptPublish", "acceptSubscribe"})
"""Settings outside the file that are shown, because clients without ZooKeeper need
them."""

LOGS_PER_STEP: Final = 25
"""Number of logs read in one step: a quarter of a millisecond."""

# MetaQ's menu, with the items that it lacks.
_HELP = (
    "*EMPTY* Returns broker info.",
    "help Returns help menu.",
    "topics Returns topics statistics detail info.",
    "offsets Returns partitions detail info.",
    "realtime Returns realtime statistics detail info.",
    "config Returns broker's config file content.",
    "reset Resets the realtime statistics.",
    "<topic> Returns one topic.",
)


def handle_stats(
    command: Stats, context: BrokerContext
) -> Generator[None, None, bytes]:
    """Return the body for an item, in steps; other words are names of topics."""
    match command.item:
        case "config":
            # The file as it was loaded, even if it has been edited since.
            return context.config.data
        case "":
            lines = yield from _broker_lines(context)
        case "topics":
            lines = yield from _topics_lines(context)
        case "offsets":
            lines = yield from _offsets_lines(context)
        case "realtime":
            lines = [f"realtime_{name} {context.realtime.describe(name)}"
                     for name in OPERATIONS]  # fmt: skip
        case "replica" if context.replica is not None:
            lines = [context.replica.facts()]
        case "exchanges":
            lines = [
                f"{name} {each.matcher.checksum}"
                for name, each in sorted(context.topics.exchanges.items())
            ]
        case "queues" if context.queues is not None:
            context.queues.require_read()
            lines = context.queues.lines()
        case "reset":
            context.realtime.reset()
            lines = ["reset ok"]
        case "help":
            return _HELP_TEXT
        case topic:
            lines = yield from _topic_lines(topic, context)
    return _wrap(lines)


def describe_durability(topic: TopicConfig, logs: Iterable[LogStatistics] = ()) -> str:
    """Return in words what an acknowledgement of this topic means.

    A reload does not change the mode with which its `logs` were opened.
    """
    is_group_commit = topic.unflush_threshold <= 0
    # Without an interval, the other mode syncs each write as well.
    is_prompt = topic.unflush_interval_ms <= 0
    text = "synced-before-ack"
    if not is_group_commit and not is_prompt:
        text = (
            f"synced-later after {topic.unflush_threshold} messages"
            f" or {topic.unflush_interval_ms} ms"
        )
    if is_prompt or all(log.is_group_commit == is_group_commit for log in logs):
        return text
    now = "synced-later" if is_group_commit else "synced-before-ack"
    return f"{now} until a restart, then {text}"


def _wrap(lines: Iterable[str]) -> bytes:
    return "\r\n".join(("STATS", *lines, "END", "")).encode()


_HELP_TEXT: Final = _wrap(_HELP)


_Lines = Generator[None, None, list[str]]


def _broker_lines(context: BrokerContext) -> _Lines:
    config, counters = context.config, context.counters
    transactions = context.transactions.counters
    logs = yield from _by_topic(context)
    total = sum(s.record_count for logs_ in logs.values() for s in logs_)
    uptime_s = int(context.clock.monotonic_s() - context.started_s)
    modes = {
        describe_durability(config.topic(name), logs.get(name, ()))
        for name in {*logs, *config.topic_names}
    }
    closed = [
        f"{topic}-{partition}"
        for topic, partitions in sorted(context.topics.closed_partitions().items())
        for partition in partitions
    ]
    return [
        f"pid {os.getpid()}",
        f"broker_id {config.system.broker_id}",
        f"port {context.port}",
        f"uptime {uptime_s}",
        f"version {SERVER_VERSION}",
        *_role_lines(context),
        f"curr_connections {context.connection_count}",
        f"threads {threading.active_count()}",
        f"cmd_put {counters.cmd_put}",
        f"cmd_get {counters.cmd_get}",
        f"cmd_offset {counters.cmd_offset}",
        f"tx_begin {transactions.begun_local + transactions.begun_xa}",
        f"tx_xa_begin {transactions.begun_xa}",
        f"tx_commit {transactions.committed}",
        f"tx_rollback {transactions.rolled_back}",
        f"get_miss {counters.get_miss}",
        f"put_failed {counters.put_failed}",
        f"total_messages {total}",
        f"topics {len({*logs, *config.topic_names})}",
        f"config_checksum {config.checksum}",
        f"durability {'; '.join(sorted(modes))}",
        " ".join(("closed_partitions", str(len(closed)), *closed)),
        *(
            f"set {key}={value}"
            for key, value in (*config.overrides.items(), *_defined_settings(config))
            if key.rpartition(":")[2] in TOLD_KEYS
        ),
    ]


def _role_lines(context: BrokerContext) -> tuple[str, ...]:
    """Return the lines about whether this broker leads, and a replica's epoch."""
    replica = context.replica
    if replica is None:
        return ("slave false",)
    if not replica.is_leading:
        return ("slave true",)
    return "slave false", f"epoch {replica.epoch}"


def _defined_settings(config: BrokerConfig) -> Iterator[tuple[str, str]]:
    """Yield key and value, as in the file, of topics made by command."""
    for name, topic in config.defined.items():
        # The first '=' of a line ends the key.
        if name not in config.topics and "=" not in name:
            yield f"{name}:numPartitions", str(topic.partition_count)
            yield f"{name}:acceptPublish", _bool(topic.accept_publish)
            yield f"{name}:acceptSubscribe", _bool(topic.accept_subscribe)


def _topics_lines(context: BrokerContext) -> _Lines:
    logs = yield from _by_topic(context)
    lines = []
    for topic, found in logs.items():
        config = context.config.topic(topic)
        lines.append(
            f"{topic} partitions {len(found)}"
            f" message_count {sum(s.record_count for s in found)}"
            f" message_bytes {sum(s.size_bytes for s in found)}"
            f" accept_publish {_bool(config.accept_publish)}"
            f" accept_subscribe {_bool(config.accept_subscribe)}"
        )
    empty = [topic for topic in context.config.topic_names if topic not in logs]
    return lines + [f"{topic} *Empty*" for topic in empty]


def _offsets_lines(context: BrokerContext) -> _Lines:
    lines = []
    for log in _sorted_logs(context):
        s = log.statistics()
        lines.append(
            f"{s.log_id.topic} part {s.log_id.partition}"
            f" min_offset {s.log_start} max_offset {s.high_watermark}"
        )
        if len(lines) % LOGS_PER_STEP == 0:
            yield
    return lines


def _topic_lines(topic: str, context: BrokerContext) -> _Lines:
    found = (yield from _by_topic(context)).get(topic, [])
    code = 0 if found else 2 if topic in context.config.topic_names else 1
    lines = [
        topic,
        f"resultCode {code}",
        f"partitions {len(found)}",
        f"message_count {sum(s.record_count for s in found)}",
        f"bytes {sum(s.size_bytes for s in found)}",
    ]
    realtime = context.realtime
    lines += [
        f"topic_realtime_{name} {realtime.describe_topic(name, topic)}"
        for name in OPERATIONS
    ]
    durability = describe_durability(context.config.topic(topic), found)
    lines.append(f"durability {durability}")
    return lines


def _by_topic(
    context: BrokerContext,
) -> Generator[None, None, dict[str, list[LogStatistics]]]:
    """Return the snapshots of all logs by topic, sorted."""
    found: dict[str, list[LogStatistics]] = {}
    for count, log in enumerate(_sorted_logs(context), 1):
        found.setdefault(log.log_id.topic, []).append(log.statistics())
        if count % LOGS_PER_STEP == 0:
            yield
    return found


def _sorted_logs(context: BrokerContext) -> list[PartitionLog]:
    return sorted(context.topics.logs(), key=lambda log: log.log_id)


def _bool(value: bool) -> str:
    return "true" if value else "false"


def handle_version(context: BrokerContext) -> bytes:
    """Return the body of `version`: version and capabilities."""
    limits = context.config.limits
    capabilities = Capabilities(
        SERVER_VERSION,
        has_mput=True,
        wait_ms_max=limits.wait_ms_max,
        payload_bytes_max=limits.payload_bytes_max,
        batch_bytes_max=limits.batch_bytes_max,
        batch_records_max=limits.batch_records_max,
        dedup=True,
        spans=True,
        codes=True,
        mput_tx=True,
        together=True,
        check=True,
        follow=context.replica is not None,
        queues=context.queues is not None,
        # The longest filter must fit in a line.
        filters=limits.filter_bytes_per_s > 0
        and limits.line_bytes_max >= LINE_BYTES_MAX,
        find=True,
        exchanges=True,
        mailbox=True,
        delay_each=context.delays is not None,
        delay_ms_max=0 if context.delays is None else limits.delay_max,
    )
    return encode_version_body(capabilities).encode()
