"""The table of a queue: each row, and that a refusal changes nothing."""

import tracemalloc
import zlib
from typing import Any

import pytest

from metaq.model import Offset, SizeBytes
from metaq.protocol.queue_frames import GROUP_DELAY, Settlement, SettleVerb, Word
from metaq.queues.leases import OpenBound
from metaq.queues.rules import INCARNATION_SHIFT, QueueRules
from metaq.queues.state import PASSED_BYTES_MAX, DeadLetter, LeasedMessage, QueueState
from metaq.queues.state_log import Done, QueueSnapshot, Returned
from tests.queues.rig import Rig

LEASE_MS = 1_000
RECLAIM_MS = 2_000


def numbers(taken: list[LeasedMessage]) -> list[int]:
    return [each.offset // 100 for each in taken]


def test_messages_are_given_out_in_their_order_and_once() -> None:
    """Each with a number of its own."""
    rig = Rig()
    rig.put(5)
    first, second = rig.take(2), rig.take(9)
    assert numbers(first) == [0, 1]
    assert numbers(second) == [2, 3, 4]
    deliveries = [each.delivery for each in (*first, *second)]
    assert deliveries == sorted(set(deliveries))
    assert rig.take(9) == []


def test_an_ack_is_done_and_the_floor_follows() -> None:
    """The floor passes no open message."""
    rig = Rig()
    rig.put(3)
    a, b, c = rig.take(3)
    assert rig.ack(b) is Word.OK
    assert (rig.state.floor, rig.state.open_count) == (0, 2)
    assert rig.ack(a) is Word.OK
    assert rig.state.floor == 200
    assert rig.ack(c) is Word.OK
    assert (rig.state.floor, rig.state.open_count) == (300, 0)
    assert rig.ack(a) is Word.DONE


def test_an_ack_after_the_lease_is_good_while_nobody_else_has_the_message() -> None:
    """Rows two and three."""
    rig = Rig()
    rig.put(2)
    a, b = rig.take(2, lease_ms=LEASE_MS)
    rig.pass_time(LEASE_MS)
    assert rig.ack(a) is Word.OK
    (again,) = rig.take(1, "other")
    assert (again.offset, again.deliveries) == (b.offset, 2)
    for verb in SettleVerb:
        assert rig.settle(b, verb, 1) is Word.LOST
    assert rig.ack(again) is Word.OK


def test_what_was_appended_since_a_restart_waits_for_no_worker_of_before() -> None:
    """The others may be with a worker: they wait until the reclaim time is over."""
    rig = Rig()
    rig.put(3)
    a, b, _ = rig.take(3)
    rig.crash(RECLAIM_MS)
    rig.put(2)
    assert numbers(rig.take(9, "other")) == [3, 4]
    assert rig.settle(a, SettleVerb.EXTEND, 2 * RECLAIM_MS) is Word.OK
    assert rig.settle(b, SettleVerb.NACK) is Word.OK
    rig.pass_time(RECLAIM_MS - 1)
    assert rig.take(9, "other") == []
    rig.pass_time(1)
    assert numbers(rig.take(9, "other")) == [1, 2]
    assert rig.ack(a) is Word.OK


def test_after_a_clean_stop_only_what_was_leased_waits() -> None:
    """For its worker, until the reclaim time is over."""
    rig = Rig()
    rig.put(4)
    a, b = rig.take(2)
    rig.stop(RECLAIM_MS)
    assert numbers(rig.take(9, "other")) == [2, 3]
    assert rig.settle(a, SettleVerb.EXTEND, 2 * RECLAIM_MS) is Word.OK
    rig.pass_time(RECLAIM_MS)
    (again,) = rig.take(9, "other")
    assert (again.offset, again.deliveries) == (b.offset, 1)


def test_no_delivery_of_what_a_log_had_before_is_good_for_what_it_has_now() -> None:
    """The log was cut: another message has the offset."""
    rig = Rig()
    rig.put()
    (old,) = rig.take()
    snapshot = rig.state.snapshot(rig.now)
    snapshot.cut(old.offset)
    snapshot.incarnation += 1
    rig.state = QueueState(rig.rules, snapshot, open_max=9)
    rig.scan(9)
    assert rig.ack(old) is Word.LOST
    assert numbers(rig.take()) == [0]


def test_a_key_waits_for_what_a_worker_of_before_may_have_of_it() -> None:
    """Other keys do not."""
    rig = Rig(QueueRules(is_ordered=True))
    rig.put(key=b"a")
    (first,) = rig.take()
    rig.crash(RECLAIM_MS)
    rig.put(key=b"a")
    rig.put(key=b"b")
    assert numbers(rig.take(9, "other")) == [2]
    assert rig.ack(first) is Word.OK
    assert numbers(rig.take(9, "other")) == [1]


@pytest.mark.parametrize("takes_letters", [True, False])
def test_an_expired_message_is_given_up_where_it_would_be_handed_out(
    takes_letters: bool,
) -> None:
    """Wherever it is in the partition, and after a return as well."""
    rig = Rig(QueueRules(retry_delays_ms=(), takes_letters=takes_letters))
    soon_ms = rig.now.wall_ms + 10
    rig.put()
    rig.put(2, expiry_ms=soon_ms)
    rig.put(expiry_ms=soon_ms + 1)
    first, second = rig.take(2)
    assert numbers([first, second]) == [0, 1]
    rig.pass_time(10)
    assert rig.settle(second, SettleVerb.NACK) is Word.OK
    (last,) = rig.take(9)
    assert numbers([last]) == [3]
    assert rig.state.has_changes
    rig.store()
    assert not rig.state.has_changes
    assert rig.ack(last) is Word.OK
    assert rig.ack(first) is Word.OK
    if takes_letters:
        causes = [(each.offset, each.deliveries, each.cause) for each in rig.letters]
        assert causes == [(100, 1, "expired"), (200, 0, "expired")]
        assert rig.state.floor == 100
        for letter in [*rig.letters]:
            rig.store_letter(letter)
    else:
        assert (rig.letters, rig.state.dropped_count) == ([], 2)
    assert (rig.state.floor, rig.state.open_count) == (400, 0)


def test_a_transaction_holds_a_message_until_its_outcome() -> None:
    """No lease ends, no settle has an effect; a commit has its own record."""
    rig = Rig()
    rig.put(2)
    a, b = rig.take(2, lease_ms=LEASE_MS)
    assert rig.hold(a) is Word.OK
    rig.state.leases.cut_short("w", rig.now.mono_ms + RECLAIM_MS)
    rig.pass_time(RECLAIM_MS)
    assert [each.offset for each in rig.take(9)] == [b.offset]
    assert (rig.state.held_count, rig.state.open_count, rig.state.floor) == (1, 2, 0)
    for verb in SettleVerb:
        wanted = Word.OK if verb is SettleVerb.EXTEND else Word.LOST
        assert rig.settle(a, verb, 1) is wanted
        assert rig.settle(a._replace(delivery=a.delivery - 1), verb, 1) is Word.LOST
    assert rig.hold(a) is Word.LOST
    before = len(rig.records)
    rig.commit(a)
    assert len(rig.records) == before + 1
    assert (rig.state.held_count, rig.state.open_count) == (0, 1)
    assert (rig.state.floor, rig.ack(a)) == (100, Word.DONE)


def test_after_a_rollback_a_message_is_its_workers_again() -> None:
    """For a whole lease, as the same delivery."""
    rig = Rig()
    rig.put(1)
    (a,) = rig.take(worker="w1", lease_ms=LEASE_MS)
    assert rig.hold(a, "w1") is Word.OK
    rig.pass_time(10 * LEASE_MS)
    rig.roll_back(a)
    assert (rig.state.leases.holders(), rig.state.held_count) == ({"w1": 1}, 0)
    rig.pass_time(rig.rules.lease_ms - 1)
    assert rig.take() == []
    assert rig.settle(a, SettleVerb.NACK, 0) is Word.OK
    assert rig.take()[0].deliveries == 2


def test_a_late_ack_in_a_transaction_is_good_as_any_late_ack() -> None:
    """Of a lease that is over and of an earlier life; not where another has it."""
    rig = Rig()
    rig.put(3)
    a, b, c = rig.take(3, lease_ms=LEASE_MS)
    rig.pass_time(LEASE_MS)
    assert rig.hold(a) is Word.OK
    assert [each.offset for each in rig.take(1)] == [b.offset]
    assert rig.hold(b) is Word.LOST
    rig.crash()
    rig.scan(9)
    assert rig.hold(c) is Word.OK
    assert [each.offset for each in rig.take(9)] == [a.offset, b.offset]
    rig.commit(c)
    assert rig.ack(c) is Word.DONE


def test_a_crash_forgets_what_was_held_and_keeps_what_was_committed() -> None:
    """A snapshot in between has what is held as open, and its count as before."""
    rig = Rig()
    rig.put(2)
    a, b = rig.take(2)
    assert (rig.hold(a), rig.hold(b)) == (Word.OK, Word.OK)
    rig.snapshot()
    rig.commit(a)
    rig.crash()
    assert [(each.offset, each.deliveries) for each in rig.take(9)] == [(b.offset, 1)]


def test_a_message_that_is_held_keeps_later_ones_of_its_key() -> None:
    """Until the commit; retention may take it, and then the outcome has no effect."""
    rig = Rig(QueueRules(is_ordered=True))
    rig.put(4, key=b"k")
    (a,) = rig.take(9)
    rig.hold(a)
    assert rig.take(9) == []
    rig.commit(a)
    (b,) = rig.take(9)
    rig.hold(b)
    rig.state.trim(Offset(200))
    rig.roll_back(b)
    assert (rig.state.held_count, rig.state.floor) == (0, 200)
    assert numbers(rig.take(9)) == [2]


def test_a_nack_waits_for_its_delay_and_counts() -> None:
    """Due on the clock; the group's delay goes by the number of deliveries."""
    rig = Rig(QueueRules(retry_delays_ms=(10, 500)))
    rig.put(1)
    (a,) = rig.take()
    assert rig.settle(a, SettleVerb.NACK, GROUP_DELAY) is Word.OK
    rig.pass_time(9)
    assert rig.take() == []
    rig.pass_time(1)
    (b,) = rig.take()
    assert b.deliveries == 2
    assert rig.settle(b, SettleVerb.NACK, GROUP_DELAY) is Word.OK
    rig.pass_time(499)
    assert rig.take() == []
    rig.pass_time(1)
    (c,) = rig.take()
    assert rig.settle(c, SettleVerb.NACK, 0) is Word.OK
    assert rig.take()[0].deliveries == 4


def test_time_has_something_to_do_when_a_lease_a_delay_or_the_reclaim_time_ends() -> (
    None
):
    """At the earliest of them."""
    rig = Rig()
    assert rig.state.next_due_ms() is None
    rig.put(2)
    (a,) = rig.take(lease_ms=5_000)
    assert rig.state.next_due_ms() == rig.now.mono_ms + 5_000
    assert rig.settle(a, SettleVerb.NACK, 3_000) is Word.OK
    assert rig.state.next_due_ms() == rig.now.mono_ms + 3_000
    rig.crash(RECLAIM_MS)
    rig.scan(9)
    assert rig.state.next_due_ms() == rig.now.mono_ms + RECLAIM_MS
    rig.pass_time(RECLAIM_MS)
    assert rig.state.next_due_ms() == rig.now.mono_ms + 3_000 - RECLAIM_MS


def test_a_released_message_does_not_count() -> None:
    """It was not begun."""
    rig = Rig()
    rig.put(1)
    for _ in range(5):
        (a,) = rig.take()
        assert a.deliveries == 1
        assert rig.settle(a, SettleVerb.RELEASE) is Word.OK


def test_an_extended_lease_goes_on_also_after_it_was_over() -> None:
    """From now on, while nobody else has the message."""
    rig = Rig()
    rig.put(1)
    (a,) = rig.take(lease_ms=LEASE_MS)
    rig.pass_time(LEASE_MS - 1)
    assert rig.settle(a, SettleVerb.EXTEND, LEASE_MS) is Word.OK
    rig.pass_time(LEASE_MS - 1)
    assert rig.take() == []
    rig.pass_time(1)
    assert rig.settle(a, SettleVerb.EXTEND, LEASE_MS) is Word.OK
    assert rig.take() == []
    assert rig.ack(a) is Word.OK


@pytest.mark.parametrize("end", ["nack", "lease"])
def test_the_last_delivery_ends_in_a_dead_letter(end: str) -> None:
    """The message stays open, and is given to nobody, until the letter is stored."""
    rig = Rig(QueueRules(deliveries_max=2, retry_delays_ms=()))
    rig.put(2)
    for number in (1, 2):
        (a,) = rig.take(lease_ms=LEASE_MS)
        assert (a.offset, a.deliveries) == (0, number)
        if end == "nack":
            assert rig.settle(a, SettleVerb.NACK, 0) is Word.OK
        else:
            rig.pass_time(LEASE_MS)
    (letter,) = rig.letters
    assert letter == DeadLetter(Offset(0), letter.size_bytes, 2, "deliveries: 2")
    assert numbers(rig.take(9)) == [1]
    assert rig.settle(a, SettleVerb.ACK) is Word.LOST
    assert rig.settle(a, SettleVerb.NACK, 0) is Word.LATER
    assert rig.state.floor == 0
    rig.store_letter(letter)
    assert rig.state.floor == 100
    assert rig.ack(a) is Word.DONE


def test_without_dead_letters_what_is_given_up_is_dropped() -> None:
    """And counted."""
    rig = Rig(QueueRules(takes_letters=False))
    rig.put(1)
    (a,) = rig.take()
    assert rig.settle(a, SettleVerb.REJECT, text="x") is Word.OK
    assert (rig.state.dropped_count, rig.state.open_count, rig.letters) == (1, 0, [])


def test_what_became_of_messages_is_counted() -> None:
    """Done, delayed, leases that ended, dead letters."""
    rig = Rig(QueueRules(retry_delays_ms=(5_000,)))
    rig.put(4)
    a, b, c, _d = rig.take(4, lease_ms=1_000)
    rig.ack(a)
    rig.settle(b, SettleVerb.NACK, GROUP_DELAY)
    rig.settle(c, SettleVerb.REJECT, text="x")
    state = rig.state
    assert (state.done_count, state.delayed_count, state.expired_count) == (1, 1, 0)
    rig.pass_time(1_000)
    assert (state.ready_count, state.delayed_count, state.expired_count) == (1, 1, 1)
    rig.store_letter(rig.letters[0])
    assert (state.done_count, state.letter_count) == (2, 1)
    rig.pass_time(4_000)
    assert (state.ready_count, state.delayed_count, state.expired_count) == (2, 0, 1)


def test_the_key_that_most_messages_wait_for_is_found() -> None:
    """With its first message, and the worker that has that one."""
    rig = Rig(QueueRules(is_ordered=True))
    rig.put(1, key=b"cold")
    assert rig.state.hot_key() is None
    rig.put(3, key=b"hot")
    rig.scan(9)
    hot = (zlib.crc32(b"hot"), 3, 100)
    assert rig.state.hot_key() == (*hot, "")
    _, first = rig.take(9, worker="slow")
    assert rig.state.hot_key() == (*hot, "slow")
    # Done, and that is not stored yet: the next one is first.
    ack = Settlement(first.offset, first.delivery, SettleVerb.ACK)
    assert rig.state.settle_all("slow", [ack], rig.now) == [Word.OK]
    assert rig.state.hot_key() == (hot[0], 2, 200, "")


def test_a_rejected_message_has_its_reason() -> None:
    """As the cause of the letter."""
    rig = Rig()
    rig.put(1)
    assert rig.settle(rig.take()[0], SettleVerb.REJECT, text="no number") is Word.OK
    assert rig.letters[0].cause == "rejected: no number"


def test_a_message_whose_lease_ended_twice_goes_alone() -> None:
    """It may kill its worker, which then has no other; one that was nacked does not."""
    rig = Rig()
    rig.put(3)
    for _ in range(2):
        assert numbers(rig.take(1, lease_ms=LEASE_MS)) == [0]
        rig.pass_time(LEASE_MS)
    assert rig.state.is_alone_first
    assert numbers(rig.take(9, lease_ms=LEASE_MS)) == [0]
    assert not rig.state.is_alone_first
    one, two = rig.take(9)
    rig.settle(one, SettleVerb.RELEASE)
    rig.settle(two, SettleVerb.RELEASE)
    rig.pass_time(LEASE_MS)
    (zero,) = rig.take(9)
    rig.settle(zero, SettleVerb.NACK, 0)
    assert numbers(rig.take(9)) == [0, 1, 2]


def test_after_a_restart_what_was_returned_twice_goes_alone() -> None:
    """It is not known for what reason."""
    rig = Rig()
    rig.put(2)
    for _ in range(2):
        (zero,) = rig.take(1)
        rig.settle(zero, SettleVerb.NACK, 0)
    rig.crash()
    assert [numbers(rig.take(9)) for _ in range(2)] == [[0], [1]]


def test_bytes_bound_a_take_but_for_its_first_message() -> None:
    """One large message is given alone."""
    rig = Rig()
    rig.put(1, size=500)
    rig.put(3)
    assert len(rig.take(9, size=450)) == 1
    assert len(rig.take(9, size=250)) == 2


def test_keys_are_given_out_one_at_a_time_in_order() -> None:
    """Until the earlier message is done, or its letter is stored."""
    rig = Rig(QueueRules(is_ordered=True, retry_delays_ms=()))
    for key in (b"a", b"a", b"b", None, b"a"):
        rig.put(1, key=key)
    first = rig.take(9)
    assert numbers(first) == [0, 2, 3]
    assert rig.settle(first[0], SettleVerb.NACK, 50) is Word.OK
    assert rig.take(9) == []
    rig.pass_time(50)
    (again,) = rig.take(9)
    assert again.offset == 0
    assert rig.settle(again, SettleVerb.REJECT, text="x") is Word.OK
    assert rig.take(9) == []
    rig.store_letter(rig.letters[0])
    (second,) = rig.take(9)
    assert numbers([second]) == [1]
    assert rig.ack(second) is Word.OK
    assert numbers(rig.take(9)) == [4]


def test_at_the_bound_nothing_more_is_found_before_something_is_done() -> None:
    """Nothing is dropped."""
    rig = Rig(open_max=3)
    rig.put(5)
    taken = rig.take(9)
    assert numbers(taken) == [0, 1, 2]
    assert (rig.take(9), rig.state.has_room) == ([], False)
    rig.ack(taken[1])
    assert numbers(rig.take(9)) == [3]


def test_a_worker_that_is_gone_gives_its_messages_back_in_a_moment() -> None:
    """One that is back in time keeps them, until its lease ends."""
    rig = Rig()
    rig.put(2)
    rig.take(1, "stays"), rig.take(1, "goes")
    rig.state.leases.cut_short("goes", rig.now.mono_ms + RECLAIM_MS)
    rig.pass_time(RECLAIM_MS - 1)
    assert rig.take(9) == []
    rig.state.leases.restore("goes")
    rig.pass_time(RECLAIM_MS)
    assert rig.take(9) == []
    rig.state.leases.cut_short("goes", rig.now.mono_ms + RECLAIM_MS)
    rig.pass_time(RECLAIM_MS)
    assert numbers(rig.take(9)) == [1]
    assert rig.state.leases.holders() == {"stays": 1, "w": 1}


def test_retention_ends_what_it_takes() -> None:
    """Open messages are counted as lost; so are bytes that nobody looked at."""
    rig = Rig()
    rig.put(6)
    a, b = rig.take(2)
    rig.ack(b)
    assert rig.state.trim(Offset(100)) == 1
    assert (rig.state.floor, rig.state.lost_bytes) == (200, 0)
    assert rig.ack(a) is Word.DONE
    assert rig.state.trim(Offset(400)) == 0
    assert (rig.state.scan_offset, rig.state.lost_bytes) == (400, 200)
    assert numbers(rig.take(9)) == [4, 5]


def test_a_range_is_given_up_by_order() -> None:
    """Open messages in it as well, in any place; what is around it stays."""
    rig = Rig()
    rig.put(7)
    a, b, c, d = rig.take(4)
    rig.settle(c, SettleVerb.REJECT)
    assert rig.ack(b) is Word.OK
    assert rig.state.count_in(Offset(100), Offset(300)) == 1
    rig.state.skip(Offset(100), Offset(300))
    assert (rig.state.floor, rig.state.skipped_bytes) == (0, 200)
    assert rig.ack(c) is Word.DONE
    rig.state.letter_stored(c.offset)  # it was on its way
    assert rig.state.open_count == 2
    rig.state.skip(Offset(400), Offset(600))
    assert numbers(rig.take(9)) == [6]
    assert rig.ack(a) is Word.OK
    assert rig.state.floor == 300
    assert rig.ack(d) is Word.OK
    assert rig.state.floor == 600
    rig.store()
    rig.crash()
    rig.pass_time(RECLAIM_MS)
    assert numbers(rig.take(9)) == [6]


def test_a_restart_forgets_leases_and_keeps_counts() -> None:
    """A message in flight has the count of its last return."""
    rig = Rig()
    rig.put(3)
    a, b, c = rig.take(3)
    rig.settle(a, SettleVerb.NACK, 60_000)
    rig.settle(b, SettleVerb.NACK, 0)
    rig.ack(c)
    rig.take(1)  # b, its second delivery
    rig.crash()
    (again,) = rig.take(9)
    assert (again.offset, again.deliveries) == (b.offset, 2)
    rig.pass_time(60_000)
    (late,) = rig.take(9)
    assert (late.offset, late.deliveries) == (a.offset, 2)
    assert rig.ack(c) is Word.DONE


def test_a_delivery_of_an_earlier_life_is_good_until_the_message_is_given_out() -> None:
    """So a worker that comes back after a restart goes on."""
    rig = Rig()
    rig.put(3)
    a, b, c = rig.take(3)
    rig.crash()
    rig.scan(9)
    assert rig.settle(a, SettleVerb.EXTEND, LEASE_MS) is Word.OK
    assert numbers(rig.take(1)) == [1]
    assert rig.ack(b) is Word.LOST
    assert rig.ack(a) is Word.OK
    assert rig.settle(c, SettleVerb.NACK, 0) is Word.OK
    assert rig.take(1)[0].deliveries == 2
    unknown = a._replace(delivery=99 << INCARNATION_SHIFT)
    assert rig.ack(unknown) is Word.DONE
    assert rig.ack(b._replace(delivery=99 << INCARNATION_SHIFT)) is Word.LOST


def test_of_two_workers_of_an_earlier_life_the_later_one_wins() -> None:
    """Both come back; the first one had lost the message to the second."""
    rig = Rig()
    rig.put(1)
    (first,) = rig.take(1, "w1", lease_ms=LEASE_MS)
    rig.pass_time(LEASE_MS)
    (second,) = rig.take(1, "w2")
    rig.crash()
    rig.scan(9)
    assert rig.settle(first, SettleVerb.EXTEND, LEASE_MS, worker="w1") is Word.OK
    assert rig.settle(second, SettleVerb.EXTEND, LEASE_MS, worker="w2") is Word.OK
    assert rig.ack(first) is Word.LOST
    assert rig.ack(second) is Word.OK


def test_a_delivery_that_never_was_changes_nothing() -> None:
    """It may be forged."""
    rig = Rig()
    rig.put(1)
    rig.scan(1)
    forged = LeasedMessage(Offset(0), rig.messages[0].size_bytes, 0, 1)
    for verb in SettleVerb:
        assert rig.settle(forged, verb, 1) is Word.LOST
    assert rig.take(1)[0].deliveries == 1


def test_a_released_message_is_ready_for_all() -> None:
    """Its worker can say nothing more of it."""
    rig = Rig()
    rig.put(1)
    (a,) = rig.take()
    assert rig.settle(a, SettleVerb.RELEASE) is Word.OK
    for verb in (*SettleVerb, *SettleVerb):
        assert rig.settle(a, verb, 1) is Word.LOST
    assert rig.take()[0].deliveries == 1


def test_a_nack_that_is_said_twice_is_one() -> None:
    """Its delay goes on; nothing is written again."""
    rig = Rig()
    rig.put(1)
    (a,) = rig.take()
    assert rig.settle(a, SettleVerb.NACK, 100) is Word.OK
    rig.pass_time(99)
    count = len(rig.records)
    assert rig.settle(a, SettleVerb.NACK, 100) is Word.OK
    assert rig.settle(a, SettleVerb.RELEASE) is Word.OK
    assert len(rig.records) == count
    assert rig.take() == []
    rig.pass_time(1)
    assert rig.take()[0].deliveries == 2


@pytest.mark.parametrize("is_whole", [False, True], ids=["changes", "snapshot"])
def test_what_was_stored_before_a_crash_and_is_said_again_counts_once(
    is_whole: bool,
) -> None:
    """Its answer was lost; a delivery after that return is another one."""
    rig = Rig()
    rig.put(3)
    a, b, c = rig.take(3, lease_ms=LEASE_MS)
    assert rig.settle(a, SettleVerb.NACK, 9 * LEASE_MS) is Word.OK
    assert rig.settle(b, SettleVerb.NACK, 0) is Word.OK
    rig.pass_time(LEASE_MS)
    (again,) = rig.take(1)
    assert (again.offset, again.deliveries) == (b.offset, 2)
    if is_whole:
        rig.snapshot()
    rig.crash()
    rig.scan(9)
    count = len(rig.records)
    assert rig.settle(a, SettleVerb.NACK, 9 * LEASE_MS) is Word.OK
    assert rig.settle(c, SettleVerb.RELEASE) is Word.OK
    assert len(rig.records) == count
    assert rig.settle(c, SettleVerb.EXTEND, LEASE_MS) is Word.OK
    assert rig.settle(again, SettleVerb.NACK, 0) is Word.OK
    assert rig.settle(b, SettleVerb.NACK, 0) is Word.LOST
    rig.pass_time(8 * LEASE_MS)
    found = {each.offset: each.deliveries for each in (*rig.take(9), *rig.take(9))}
    assert found == {a.offset: 2, b.offset: 3, c.offset: 2}


HOUR_MS = 3_600_000
DECADE_MS = 10 * 365 * 24 * HOUR_MS


@pytest.mark.parametrize("jump_ms", [HOUR_MS, -HOUR_MS, DECADE_MS, -DECADE_MS])
@pytest.mark.parametrize("is_whole", [False, True], ids=["changes", "snapshot"])
@pytest.mark.parametrize("crashes", [0, 1, 2])
def test_a_jump_of_the_wall_clock_holds_nothing_up(
    jump_ms: int, is_whole: bool, crashes: int
) -> None:
    """Leases and delays end in time; after a restart a delay begins anew at most."""
    rig = Rig()
    rig.put(3)
    done, delayed, leased = rig.take(3, lease_ms=LEASE_MS)
    assert rig.ack(done) is Word.OK
    assert rig.settle(delayed, SettleVerb.NACK, 2 * LEASE_MS) is Word.OK
    rig.now = rig.now._replace(wall_ms=rig.now.wall_ms + jump_ms)
    if is_whole:
        rig.snapshot()
    for _ in range(crashes):
        rig.crash()
        rig.scan(9)
        if is_whole:
            rig.snapshot()
    if not crashes:
        assert rig.take(9) == []
    found = [each.offset for each in rig.take(9)]
    for _ in range(2):
        rig.pass_time(LEASE_MS)
        found += [each.offset for each in rig.take(9)]
    assert sorted(found) == [delayed.offset, leased.offset]
    assert rig.ack(done) is Word.DONE


def test_a_gap_in_the_log_is_done() -> None:
    """The floor passes it, now and after a restart."""
    rig = Rig()
    rig.put(1)
    rig.end = Offset(150)
    rig.put(1)
    taken = rig.take(9)
    assert [each.offset for each in taken] == [0, 150]
    assert [rig.ack(each) for each in taken] == [Word.OK] * 2
    assert rig.state.floor == 250
    rig.crash()
    assert rig.take(9) == []


def test_a_key_is_free_when_a_restart_knows_that_its_message_is_done() -> None:
    """A crash before that brings back no message behind a later one of its key."""
    rig = Rig(QueueRules(is_ordered=True))
    rig.put(2, key=b"a")
    (first,) = rig.take(1)
    assert rig.state.settle("w", _ack(first), rig.now) is Word.OK
    assert rig.take(1) == []
    rig.crash()
    assert numbers(rig.take(9)) == [0]
    rig.crash()
    rig.scan_through(first.offset)
    assert rig.ack(first) is Word.OK
    assert numbers(rig.take(9)) == [1]


def test_a_group_that_is_ordered_from_now_on_has_one_message_of_a_key_at_once() -> None:
    """The worker of a later one may only say that it is done."""
    rig = Rig()
    rig.put(2, key=b"a")
    _first, second = rig.take(2)
    rig.rules = QueueRules(is_ordered=True)
    rig.crash()
    rig.scan_through(Offset(100))
    assert rig.settle(second, SettleVerb.EXTEND, LEASE_MS) is Word.LOST
    assert numbers(rig.take(9)) == [0]
    assert rig.ack(second) is Word.OK


def test_a_life_ends_long_before_its_numbers_do() -> None:
    """A delivery number is never used twice."""
    assert not Rig().state.needs_new_incarnation
    rig = Rig(make_state=OldState)
    assert rig.state.needs_new_incarnation
    rig.put()
    (held,) = rig.take()
    assert rig.hold(held) is Word.OK
    assert not rig.state.needs_new_incarnation  # its transaction would not find it
    rig.commit(held)
    assert rig.state.needs_new_incarnation


def test_a_queue_that_leaves_memory_counts_in_no_bound() -> None:
    """Nor does a letter of it that is stored later."""
    bound, rig = OpenBound(9), Rig(QueueRules(deliveries_max=1))
    rig.state = QueueState(
        rig.rules, QueueSnapshot(Offset(0), incarnation=1), open_max=9, bound=bound
    )
    rig.put(2)
    first, _ = rig.take(2)
    assert rig.settle(first, SettleVerb.REJECT) is Word.OK
    assert bound.count == 2
    rig.state.leave_bound()
    assert bound.count == 0
    rig.state.letter_stored(first.offset)
    assert bound.count == 0


class OldState(QueueState):
    """A life that has given out half a million million messages."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._counter = 1 << (INCARNATION_SHIFT - 1)


def test_a_snapshot_is_what_a_restart_would_know() -> None:
    """Ranges, counts and delays; not who has what."""
    rig = Rig()
    rig.put(6)
    taken = rig.take(6)
    rig.ack(taken[1]), rig.ack(taken[4])
    rig.settle(taken[2], SettleVerb.NACK, 70)
    rig.snapshot()
    rig.crash()
    assert numbers(rig.take(9)) == [0, 3, 5]
    rig.pass_time(70)
    (late,) = rig.take(9)
    assert (numbers([late]), late.deliveries) == ([2], 2)


@pytest.mark.parametrize("is_whole", [False, True], ids=["changes", "snapshot"])
def test_a_message_of_a_letter_that_is_not_stored_is_not_given_out_too_often(
    is_whole: bool,
) -> None:
    """After a restart its letter is sent again, at the latest after the last time."""
    rig = Rig(QueueRules(retry_delays_ms=(), deliveries_max=2))
    rig.put()
    for _ in range(2):
        rig.settle(rig.take()[0], SettleVerb.NACK)
    assert [each.offset for each in rig.letters] == [0]
    if is_whole:
        rig.snapshot()
    rig.crash()
    taken = rig.take()
    assert [each.deliveries for each in taken] == ([] if is_whole else [2])
    for each in taken:
        rig.settle(each, SettleVerb.NACK)
    rig.store()
    assert [each[:3] for each in rig.letters] == [(0, 100, 2)]


@pytest.mark.parametrize("reclaim_ms", [0, 10])
def test_a_message_is_dropped_where_the_maximum_was_reduced(reclaim_ms: int) -> None:
    """Once no worker may hold it, and nothing that was done after it comes again."""
    rig = Rig(QueueRules(retry_delays_ms=(), takes_letters=False))
    rig.put(3)
    taken = rig.take(2)
    rig.settle(taken[0], SettleVerb.NACK)
    rig.ack(taken[1])
    rig.rules = QueueRules(deliveries_max=1, takes_letters=False)
    rig.crash(reclaim_ms)
    if reclaim_ms:
        assert (rig.take(3), rig.state.open_count) == ([], 2)
        rig.pass_time(reclaim_ms)
    assert numbers(rig.take(3)) == [2]
    assert (rig.state.dropped_count, rig.state.open_count) == (1, 1)
    rig.crash()
    assert numbers(rig.take(3)) == [2]


@pytest.mark.parametrize("is_clean", [False, True], ids=["snapshot", "stop"])
def test_a_late_ack_does_not_take_a_message_from_its_worker_after_a_restart(
    is_clean: bool,
) -> None:
    """The state that was written knows that the message was given out again."""
    rig = Rig()
    rig.put()
    (late,) = rig.take(worker="a", lease_ms=10)
    rig.pass_time(10)
    (taken,) = rig.take(worker="b")
    if is_clean:
        rig.stop(reclaim_ms=10)
    else:
        rig.snapshot()
        rig.crash(reclaim_ms=10)
    rig.scan_through(late.offset)
    assert rig.settle(late, SettleVerb.ACK, worker="a") is Word.LOST
    assert rig.settle(taken, SettleVerb.ACK, worker="b") is Word.OK


def test_what_never_reached_its_worker_is_given_out_again() -> None:
    """It does not count."""
    rig = Rig()
    rig.put(2)
    rig.state.release(rig.take(2))
    again = rig.take(2)
    assert [each.deliveries for each in again] == [1, 1]


@pytest.mark.parametrize("deliveries_max", [1, 2])
def test_what_comes_back_after_its_lease_is_left_as_that_ended(
    deliveries_max: int,
) -> None:
    """A slow disk: the message is returned, or its letter is on its way, by then."""
    rig = Rig(QueueRules(deliveries_max=deliveries_max, retry_delays_ms=()))
    rig.put(1)
    taken = rig.take(1, lease_ms=LEASE_MS)
    rig.pass_time(LEASE_MS)
    rig.state.release(taken)
    again = [each.deliveries for each in rig.take(1)]
    assert again == ([] if deliveries_max == 1 else [2])
    assert len(rig.letters) == (deliveries_max == 1)


def test_neighbours_that_are_done_are_one_change() -> None:
    """One settle of many is a few bytes."""
    rig = Rig()
    rig.put(100)
    for each in rig.take(100):
        rig.state.settle("w", _ack(each), rig.now)
    assert rig.state.drain_changes() == [Done(Offset(0), Offset(10_000))]


def _ack(taken: LeasedMessage) -> Settlement:
    return Settlement(taken.offset, taken.delivery, SettleVerb.ACK)


def test_settles_of_one_request_are_taken_in_their_order() -> None:
    """Acks in a row are one change; one that is said twice is done by then."""
    rig = Rig()
    rig.put(5)
    a, b, c, d, e = rig.take(5)
    nack = Settlement(c.offset, c.delivery, SettleVerb.NACK, 0)
    entries = [_ack(a), _ack(b), nack, _ack(d), _ack(a), _ack(e), _ack(c)]
    assert rig.state.settle_all("w", entries, rig.now) == [
        Word.OK, Word.OK, Word.OK, Word.OK, Word.DONE, Word.OK, Word.OK,
    ]  # fmt: skip
    returned, done = rig.state.drain_changes()
    assert (type(returned), done) == (Returned, Done(Offset(0), Offset(500)))
    assert (rig.state.floor, rig.state.open_count) == (500, 0)
    assert (rig.state.done_count, rig.state.leases.holders()) == (5, {})


def test_acks_of_one_request_end_their_leases() -> None:
    """Of each take that they are of, in any order: the worker has nothing then."""
    rig = Rig()
    rig.put(4)
    first = rig.take(2)
    rig.pass_time(1)
    second = rig.take(2)
    acks = [_ack(each) for pair in zip(first, second, strict=True) for each in pair]
    assert rig.state.settle_all("w", acks[:3], rig.now) == [Word.OK] * 3
    assert rig.state.leases.holders() == {"w": 1}
    assert rig.state.drain_changes() == [Done(Offset(0), Offset(300))]
    assert rig.state.settle_all("w", acks[3:], rig.now) == [Word.OK]
    assert rig.state.leases.holders() == {}
    assert rig.state.floor == 400


@pytest.mark.slow
def test_an_open_message_takes_little_memory() -> None:
    """Twenty thousand of them are some megabytes."""
    rig = Rig(open_max=20_000)
    rig.put(20_000)
    stored = rig.messages
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for offset, size, *_ in stored:
            rig.state.found(offset, size, None, rig.now)
        rig.state.take("w", 20_000, 10**9, 30_000, rig.now)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / 20_000 < 700


def test_what_is_passed_over_is_done_and_stored_with_the_next_change() -> None:
    """Neighbours are one range with what was settled; the floor goes on at once."""
    rig = Rig()
    state = rig.state
    state.pass_over(Offset(200), 2)
    assert (state.floor, state.scan_offset, state.passed_count) == (200, 200, 2)
    assert not state.has_changes
    state.found(Offset(200), SizeBytes(100), None, rig.now)
    state.pass_over(Offset(400), 1)
    assert (state.floor, state.scan_offset, state.open_count) == (200, 400, 1)
    assert state.is_done(Offset(300))
    (taken,) = rig.take(9)
    ack = Settlement(taken.offset, taken.delivery, SettleVerb.ACK, 0)
    assert state.settle("w", ack, rig.now) is Word.OK
    assert state.floor == 400
    assert state.drain_changes() == [Done(Offset(0), Offset(400))]
    assert state.drain_changes() == []
    assert state.done_count == 4


def test_much_that_is_passed_over_is_a_change_by_itself() -> None:
    """A restart does not look at all of it again."""
    state = Rig().state
    state.pass_over(Offset(PASSED_BYTES_MAX - 1), 5)
    assert not state.has_changes
    state.pass_over(Offset(PASSED_BYTES_MAX), 1)
    assert state.has_changes
    assert state.drain_changes() == [Done(Offset(0), Offset(PASSED_BYTES_MAX))]
    assert not state.has_changes
