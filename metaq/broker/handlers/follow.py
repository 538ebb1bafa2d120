"""`follow`: requests between the replicas of a set (docs/replication.md)."""

from metaq.broker.acks import Answerer
from metaq.errors import UnavailableError, WireError
from metaq.protocol import texts
from metaq.protocol.commands import Follow
from metaq.protocol.encoding import encode_refusal, encode_value_line


def handle_follow(command: Follow, answerer: Answerer) -> None:
    """Have the replica answer, now or later.

    Raises:
        UnavailableError: this broker is not in a replica set.
    """
    replica = answerer.context.replica
    if replica is None:
        raise UnavailableError(texts.NO_REPLICA_SET)
    answerer.hold(count=1, size_bytes=0)

    def answer(reply: bytes | WireError) -> None:
        if isinstance(reply, bytes):
            data = encode_value_line(len(reply), command.opaque) + reply
        else:
            data = encode_refusal(reply, command.opaque)
        answerer.answer(data, count=1, size_bytes=0, is_alone=True)

    replica.handle(command, answerer, answer)
