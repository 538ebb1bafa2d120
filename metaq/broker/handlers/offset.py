"""`offset`: where reading can start (broker spec 1.6), and questions about the log."""

from metaq.broker.acks import Answerer
from metaq.broker.context import BrokerContext
from metaq.broker.questions import begin_answer
from metaq.errors import NotFoundError
from metaq.model import Offset
from metaq.protocol import texts
from metaq.protocol.commands import OffsetQuery


def handle_offset(
    command: OffsetQuery, answerer: Answerer, context: BrokerContext
) -> bytes | None:
    """Return the nearest offset: log start, start of a segment, or the end.

    Closed partitions answer too. A question is answered later; then None is returned.

    Raises:
        NotFoundError: no put has made this log.
        ServerError: the log cannot answer the question now.
    """
    context.counters.cmd_offset += 1
    if context.topics.has_stat(command.topic):
        context.realtime.record("offset", command.topic)
    log = context.topics.find_log(command.topic, command.partition)
    if log is None:
        raise NotFoundError(texts.no_such_log(command.topic, command.partition))
    if command.question is not None:
        begin_answer(command, command.question, log, answerer, context)
        return None
    return b"%d" % log.nearest_offset(Offset(command.offset))
