"""Leases forget messages that they have no more, and end once for each other one."""

from metaq.model import Offset, SizeBytes
from metaq.protocol.queue_frames import SettleVerb
from metaq.queues.leases import Lease, OpenMessage
from tests.queues.rig import Rig


def test_a_lease_forgets_what_has_ended_while_it_has_one_message() -> None:
    """One slow message does not keep the thousand that were taken with it in memory."""
    lease = Lease("w", 1000)
    messages = [
        OpenMessage(Offset(100 * n), SizeBytes(100), 0, None, None) for n in range(1000)
    ]
    for each in messages:
        lease.add(each)
    for each in messages[1:]:
        lease.remove(each)
    assert [*lease.messages] == messages[:1]


def test_what_is_taken_again_at_once_ends_once() -> None:
    """By the same worker, within the millisecond, so in the same lease."""
    rig = Rig()
    rig.put(2)
    first, _ = rig.take(2)
    rig.settle(first, SettleVerb.RELEASE)
    rig.take(1)
    rig.pass_time(30_000)
    assert rig.state.expired_count == 2
    assert (rig.state.ready_count, rig.state.leases.holders()) == (2, {})


def test_leases_of_a_worker_that_is_away_end_early_and_a_later_one_does_not() -> None:
    """Though both have the same end."""
    rig = Rig()
    rig.put(2)
    rig.take(1)
    rig.state.leases.cut_short("w", rig.now.mono_ms + 2_000)
    rig.take(1)
    rig.pass_time(2_000)
    assert rig.state.expired_count == 1
    assert rig.state.leases.holders() == {"w": 1}
