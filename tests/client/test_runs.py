"""Runs: lists sorted by partition, and cut into batches."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from metaq.client import OutgoingMessage
from metaq.client.produce.runs import Run, sort_runs


@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=40),
    bytes_max=st.integers(1, 200),
    count_max=st.integers(1, 10),
)
def test_a_run_is_given_out_whole_and_in_order(
    sizes: list[int], bytes_max: int, count_max: int
) -> None:
    """At least one message at a time, and no more than a batch takes."""
    payloads = [bytes(size) for size in sizes]
    run = Run(None, payloads, list(range(len(sizes))), may_move=True)
    found: list[bytes] = []
    flags: list[int] = []
    while not run.is_over:
        some, some_flags, ends = run.next_messages(bytes_max, count_max)
        assert len(some) == 1 or ends[-1] - ends[0] <= bytes_max
        assert 1 <= len(some) <= count_max
        assert len(ends) == len(some) + 1
        found += some
        flags += some_flags or [0] * len(some)
        run.advance(len(some))
    assert found == payloads
    assert flags == list(range(len(sizes)))


def test_messages_are_sorted_by_sender_and_numbered() -> None:
    """A run in order of its first message; one fixed message fixes its run."""
    senders: list[Any] = [object(), object()]

    def select(message: OutgoingMessage) -> Any:
        return senders[message.data[0] % 2], message.data != b"\x03"

    messages = [OutgoingMessage(bytes([n])) for n in (1, 2, 3, 4)]
    runs, order = sort_runs(messages, select)
    assert [run.sender for run in runs] == [senders[1], senders[0]]
    assert [run.may_move for run in runs] == [False, True]
    assert order == [0, 2, 1, 3]
