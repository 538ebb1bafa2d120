"""A fetched batch hands each message out once, and counts what is handled."""

from tests.client.test_fetch_buffer import STEP, ZERO, batch, numbers


def test_what_was_stopped_hands_out_no_more_to_old_loops_and_new_ones() -> None:
    stopped = batch(ZERO, 0, 4)
    old = stopped.begin()
    assert numbers([next(old)]) == [0]
    stopped.stop()
    assert list(old) == list(stopped.begin()) == stopped.take(2) == []
    assert stopped.handed == 1


def test_a_loop_ends_where_the_next_one_begins_and_none_is_skipped() -> None:
    one = batch(ZERO, 0, 4)
    first = one.begin()
    assert numbers([next(first)]) == [0]
    second = one.begin()
    assert list(first) == []
    assert numbers(list(second)) == [1, 2, 3]
    assert (one.handed, one.handled) == (4, 3)


def test_what_is_taken_counts_as_handled_when_more_is_asked_for() -> None:
    """`take_more` adds to what is being handled; `confirm` ends all of it."""
    one = batch(ZERO, 0, 6)
    assert numbers(one.take(2)) == [0, 1]
    assert (one.handed, one.handled) == (2, 0)
    assert numbers(one.take_more(1)) == [2]
    assert (one.handed, one.handled) == (3, 0)
    assert numbers(one.take(1)) == [3]
    assert (one.handed, one.handled) == (4, 3)
    one.confirm()
    assert (one.handled, one.is_used_up) == (4, False)


def test_a_grown_batch_has_what_is_being_handled_and_hands_out_the_next() -> None:
    """Not with messages that the first one had handled before."""
    one = batch(ZERO, 0, 3)
    one.take(1)
    one.take(2)
    both = one.grown(batch(ZERO, 3, 2))
    assert (numbers(both.messages), both.handled) == ([1, 2, 3, 4], 0)
    assert numbers(both.take_more(9)) == [3, 4]
    assert (both.handed, both.handled) == (4, 0)
    both.confirm()
    assert (both.handled, both.next_offset) == (4, 5 * STEP)


def test_the_rest_of_a_recalled_batch_is_not_handed_out() -> None:
    """Not to the loop that has begun, and not to another."""
    one = batch(ZERO, 0, 4)
    loop = one.begin()
    assert numbers([next(loop)]) == [0]
    one.recall()
    assert list(loop) == one.take(9) == []
    assert (one.handed, one.is_used_up) == (1, True)


def test_what_is_within_some_bytes_is_counted_from_the_next_message_on() -> None:
    one = batch(ZERO, 0, 6)
    one.take(2)
    assert [one.count_within(STEP * n) for n in (1, 3, 9)] == [1, 3, 4]
    assert one.count_within(STEP - 1) == 0
