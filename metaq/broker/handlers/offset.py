"""`offset`: where reading can start (broker spec 1.6)."""

from metaq.broker.context import BrokerContext
from metaq.errors import NotFoundError
from metaq.model import Offset
from metaq.protocol import texts
from metaq.protocol.commands import OffsetQuery


def handle_offset(command: OffsetQuery, context: BrokerContext) -> bytes:
    """Return the nearest offset: log start, start of a segment, or the end.

    Closed partitions answer too.

    Raises:
        NotFoundError: no put has made this log.
    """
    context.counters.cmd_offset += 1
    if context.topics.has_stat(command.topic):
        context.realtime.record("offset", command.topic)
    log = context.topics.find_log(command.topic, command.partition)
    if log is None:
        raise NotFoundError(texts.no_such_log(command.topic, command.partition))
    return b"%d" % log.nearest_offset(Offset(command.offset))
