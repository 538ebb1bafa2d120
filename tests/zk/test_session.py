"""The session's state machine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.errors import SessionLostError, SessionSuspendedError
from metaq.zk.session import (
    TRANSITIONS,
    SessionEvent,
    SessionState,
    SessionStatus,
    SessionTracker,
)

E = SessionEvent


def test_the_table_covers_every_state_and_event() -> None:
    """No report of the client library finds the machine without an answer."""
    assert set(TRANSITIONS) == {(s, e) for s in SessionState for e in SessionEvent}


def test_a_new_session_starts_a_new_session_version_and_a_resumed_one_does_not() -> (
    None
):
    """Suspended is not lost: the same session keeps its version."""
    tracker = SessionTracker()
    assert tracker.status == SessionStatus(
        SessionState.LOST, session_version=0, session_id=0
    )
    session_versions = [
        (status.state.value, status.session_version)
        for event, number in [
            (E.ESTABLISHED, 5),
            (E.DISCONNECTED, 0),
            (E.ESTABLISHED, 5),
            (E.DISCONNECTED, 0),
            (E.EXPIRED, 0),
            (E.ESTABLISHED, 6),
        ]
        if (status := tracker.apply(event, number))
    ]
    assert session_versions == [
        ("connected", 1),
        ("suspended", 1),
        ("connected", 1),
        ("suspended", 1),
        ("lost", 1),
        ("connected", 2),
    ]


def test_the_time_out_of_a_session_is_remembered_until_the_next_greeting() -> None:
    """A server that comes back may have changed its mind."""
    tracker = SessionTracker()
    assert tracker.status.timeout_s == 0
    found = []
    for event, timeout_s in [
        (E.ESTABLISHED, 4.0),
        (E.DISCONNECTED, 0.0),
        (E.ESTABLISHED, 6.0),
        (E.EXPIRED, 0.0),
    ]:
        tracker.apply(event, 5, timeout_s)
        found.append(tracker.status.timeout_s)
    assert found == [4.0, 4.0, 6.0, 6.0]


def test_another_session_without_a_report_of_loss_is_a_new_session_version() -> None:
    """An expiry that was never reported is noticed by the session's number."""
    tracker = SessionTracker()
    tracker.apply(E.ESTABLISHED, 5)
    status = tracker.apply(E.ESTABLISHED, 6)
    assert status == SessionStatus(
        SessionState.CONNECTED, session_version=2, session_id=6
    )


def test_the_same_number_after_a_loss_is_a_new_session_version() -> None:
    """Versions never repeat, even where session numbers do."""
    tracker = SessionTracker()
    tracker.apply(E.ESTABLISHED, 5)
    tracker.apply(E.EXPIRED)
    status = tracker.apply(E.ESTABLISHED, 5)
    assert status == SessionStatus(
        SessionState.CONNECTED, session_version=2, session_id=5
    )


@given(
    st.lists(st.tuples(st.sampled_from(SessionEvent), st.integers(1, 3)), max_size=20)
)
def test_session_versions_grow_exactly_with_new_sessions(
    reports: list[tuple[SessionEvent, int]],
) -> None:
    """Over any history the version grows only when ephemeral nodes may be gone."""
    tracker = SessionTracker()
    for event, number in reports:
        before = tracker.status
        changed = tracker.apply(event, number)
        after = tracker.status
        assert changed == (after if after != before else None)
        is_new = event is E.ESTABLISHED and (
            before.state is SessionState.LOST or before.session_id != number
        )
        assert after.session_version == before.session_version + is_new


def test_require_connected_tells_suspended_from_lost() -> None:
    """Callers learn which of the two it is by the error's class."""
    SessionStatus(
        SessionState.CONNECTED, session_version=1, session_id=9
    ).require_connected()
    with pytest.raises(SessionSuspendedError, match="0x9"):
        SessionStatus(
            SessionState.SUSPENDED, session_version=1, session_id=9
        ).require_connected()
    with pytest.raises(SessionLostError):
        SessionStatus(
            SessionState.LOST, session_version=1, session_id=9
        ).require_connected()
