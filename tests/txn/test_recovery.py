"""Replay of redo files: which bytes count, and what they say."""

import pytest

from metaq.model import LogId, MessageId, Offset
from metaq.txn.records import (
    OFFSET,
    BatchLocation,
    RedoOperation,
    bounds_of,
    encode_operation,
    encode_put,
)
from metaq.txn.recovery import Replay, make_batches
from metaq.txn.sums import BOUND, decode_sums, encode_entry, encode_head, encode_span

KEY = "TX:s:1"
PUT = encode_put(MessageId(1 << 40), b"put test 0 1 0 -1 TX:s:1 1\r\nx")
PLACES = (BatchLocation(LogId("test", 0), Offset(0), 21, 5),)
COMMIT = encode_operation(RedoOperation.LOCAL_COMMIT, KEY, locations=PLACES)
DATA = PUT + COMMIT
((BOUND_AT, _BOUND),) = bounds_of(PLACES, len(DATA))


def test_puts_of_one_id_are_as_many_batches() -> None:
    """A message of an exchange has one id in each of its topics; a copy is none."""
    commands = [b"put %b 0 1 0 -1 TX:s:1 1\r\nx" % name for name in (b"a", b"b", b"a")]
    puts = [encode_put(MessageId(7), command) for command in commands]
    replay = Replay()
    replay.read(b"".join(puts), decode_sums(encode_head(1), 1), "redo.1")
    batches = make_batches(replay.open[KEY])
    assert [(each.log_id.topic, each.ids) for each in batches] == [
        ("a", (7,)),
        ("b", (7,)),
    ]


@pytest.mark.parametrize("size", range(len(PUT), len(DATA)))
def test_a_commit_cut_anywhere_before_its_sync_is_a_torn_tail(size: int) -> None:
    """Also inside the offset that may be rewritten: the puts in front of it count."""
    entries = (
        encode_head(1),
        encode_span(0, PUT, is_synced=True),
        encode_entry(BOUND, 0, BOUND_AT, 0),
        encode_span(len(PUT), COMMIT, is_synced=False),
    )
    assert BOUND_AT + OFFSET.size < len(DATA)
    replay = Replay()
    replay.read(DATA[:size], decode_sums(b"".join(entries), 1), "redo.1")
    assert [each for each, _ in replay.open[KEY].puts] == [MessageId(1 << 40)]
    assert not replay.commits
    torn = f"file=redo.1 position={len(PUT)} bytes={size - len(PUT)}"
    notes = [f"torn tail of the journal ignored: {torn}"] if size > len(PUT) else []
    assert replay.notes == notes
