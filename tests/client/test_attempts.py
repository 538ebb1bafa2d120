"""Outcome of a failed command, as a table; and cuts of batches."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.client.errors import OutcomeUnknownError
from metaq.client.produce.attempts import (
    PUTS_BYTES_MAX,
    PUTS_MAX,
    AttemptLimits,
    BatchSpan,
    Reaction,
    final_error,
    on_failure,
    plan_spans,
)
from metaq.errors import (
    ClosedError,
    ConnectionLostError,
    DiskFailedError,
    ForbiddenError,
    MetaqError,
    NoBrokerError,
    NotFoundError,
    NotLeaderError,
    NotSentError,
    RequestTimeoutError,
    ServerError,
    TooFewReplicasError,
    UnavailableError,
    UnexpectedReplyError,
)
from metaq.peer.replies import parse_receipt
from metaq.protocol.commands import Result
from metaq.protocol.version import Capabilities
from tests.cases import for_each
from tests.client.producing import at

AGAIN, MOVE, FAIL = Reaction.AGAIN, Reaction.MOVE, Reaction.FAIL
CERTAIN = [NoBrokerError, NotSentError, ClosedError, ForbiddenError, UnavailableError]
FINAL = [ServerError, NotFoundError, UnexpectedReplyError]


@for_each("kind", CERTAIN)
@for_each("has_dedup", [True, False])
@for_each("retry_unknown", [True, False])
@for_each(
    "may_move, is_in_doubt, decision",
    [
        (True, False, MOVE),
        (False, False, AGAIN),
        (True, True, AGAIN),  # it may lie there already: nowhere else
        (False, True, AGAIN),
    ],
)
def test_what_certainly_was_not_stored(
    kind: type[MetaqError],
    has_dedup: bool,
    retry_unknown: bool,
    may_move: bool,
    is_in_doubt: bool,
    decision: Reaction,
) -> None:
    """It goes elsewhere if it may; what was unknown before stays so."""
    assert on_failure(
        kind("x"),
        may_move=may_move,
        is_in_doubt=is_in_doubt,
        has_dedup=has_dedup,
        retry_unknown=retry_unknown,
    ) == (decision, is_in_doubt)


@pytest.mark.parametrize("may_move", [True, False])
@pytest.mark.parametrize("is_in_doubt", [True, False])
@pytest.mark.parametrize(
    ("has_dedup", "retry_unknown", "decision"),
    [
        (True, True, AGAIN),
        (True, False, AGAIN),
        (False, True, AGAIN),
        (False, False, FAIL),
    ],
)
def test_a_lost_connection_leaves_a_doubt(
    may_move: bool,
    is_in_doubt: bool,
    has_dedup: bool,
    retry_unknown: bool,
    decision: Reaction,
) -> None:
    """The same partition again, if the broker recognises it or the user allows it."""
    assert on_failure(
        ConnectionLostError("x"),
        may_move=may_move,
        is_in_doubt=is_in_doubt,
        has_dedup=has_dedup,
        retry_unknown=retry_unknown,
    ) == (decision, True)


@pytest.mark.parametrize(
    ("text", "decision"),
    [
        ("[partition 't-0'] failed.Detail:sync failed. [in-doubt]", AGAIN),
        ("[partition 't-0'] failed.", FAIL),  # all that MetaQ 1.4 says
    ],
)
def test_a_disk_that_failed_under_a_put_leaves_a_doubt(
    text: str, decision: Reaction
) -> None:
    """The record may be there after a restart; again only where it is recognised."""
    with pytest.raises(ServerError) as caught:
        parse_receipt(Result(500, text.encode(), 1))
    assert str(caught.value) == text.removesuffix(" [in-doubt]")
    assert on_failure(
        caught.value,
        may_move=True,
        is_in_doubt=False,
        has_dedup=True,
        retry_unknown=True,
    ) == (decision, True)


@pytest.mark.parametrize("is_in_doubt", [True, False])
@pytest.mark.parametrize("kind", [*FINAL, RequestTimeoutError])
def test_what_ends_it(kind: type[MetaqError], is_in_doubt: bool) -> None:
    """Other answers, and the deadline; only the deadline leaves it unknown."""
    assert on_failure(
        kind("x"),
        may_move=True,
        is_in_doubt=is_in_doubt,
        has_dedup=True,
        retry_unknown=True,
    ) == (FAIL, is_in_doubt or kind is RequestTimeoutError)


LIMITS = AttemptLimits(answer_timeout_s=1.0, retries_max=3)


@pytest.mark.parametrize(
    ("error", "attempt", "wanted"),
    [
        (RequestTimeoutError("x"), 1, (AGAIN, True)),
        (RequestTimeoutError("x"), 3, (AGAIN, True)),
        (RequestTimeoutError("x"), 4, (FAIL, True)),
        (ConnectionLostError("x"), 3, (AGAIN, True)),
        (ConnectionLostError("x"), 4, (FAIL, True)),
        (NotSentError("x"), 3, (AGAIN, False)),
        (NotSentError("x"), 4, (FAIL, False)),
        (ForbiddenError("x"), 1, (FAIL, False)),
        (UnavailableError("x"), 1, (FAIL, False)),
        (NotLeaderError("x"), 9, (AGAIN, False)),
        (TooFewReplicasError("x"), 9, (AGAIN, False)),
        (DiskFailedError("x"), 1, (FAIL, True)),
        (ServerError("x"), 1, (FAIL, False)),
    ],
)
def test_limited_attempts(
    error: MetaqError, attempt: int, wanted: tuple[Reaction, bool]
) -> None:
    """Silence is asked again, so many times; a refusal is final, but of a set."""
    decision = on_failure(
        error,
        may_move=False,
        is_in_doubt=False,
        has_dedup=False,
        retry_unknown=True,
        attempt=attempt,
        limits=LIMITS,
    )
    assert decision == wanted


def test_the_last_error_says_whether_it_may_be_stored() -> None:
    """If it may be stored, the last error becomes an unknown outcome."""
    refused = ForbiddenError("closed")
    assert final_error(refused, at(3), is_in_doubt=False) is refused
    unknown = final_error(refused, at(3), is_in_doubt=True)
    assert isinstance(unknown, OutcomeUnknownError)
    assert str(unknown) == "test/0-3: outcome unknown: closed"
    assert unknown.__cause__ is refused
    assert final_error(unknown, at(3), is_in_doubt=True) is unknown
    lost = ConnectionLostError("connection is lost; request outcome unknown")
    assert str(final_error(lost, at(3), is_in_doubt=True)) == f"test/0-3: {lost}"


@given(
    sizes=st.lists(st.integers(20, 60), min_size=1, max_size=40),
    bytes_max=st.none() | st.integers(20, 200),
    count_max=st.none() | st.integers(1, 10),
    data=st.data(),
)
def test_spans_keep_order_and_what_was_announced(
    sizes: list[int], bytes_max: int | None, count_max: int | None, data: st.DataObject
) -> None:
    """They cover the messages; each mput is within the limits and as long as it can."""
    ends = list(accumulate(sizes, initial=0))
    first = data.draw(st.integers(0, len(sizes) - 1))
    end = data.draw(st.integers(first + 1, len(sizes)))
    capabilities = Capabilities(
        "v", has_mput=True, batch_bytes_max=bytes_max, batch_records_max=count_max
    )
    spans = plan_spans(ends, first, end, capabilities)
    covered = [n for span in spans for n in range(span.first, span.end)]
    assert covered == list(range(first, end))
    for span, follower in zip(spans, [*spans[1:], None], strict=True):
        size = ends[span.end] - ends[span.first]
        count = span.end - span.first
        assert count_max is None or count <= count_max
        assert span.is_mput == (bytes_max is None or size <= bytes_max)
        assert span.is_mput or count == 1
        if follower is not None and span.is_mput:
            larger = size + sizes[span.end]
            assert count == count_max or (bytes_max is not None and larger > bytes_max)


def test_without_mput_single_puts_leave_in_runs() -> None:
    """A MetaQ 1.4 broker announces nothing; a large message leaves alone."""
    java = Capabilities("1.4")
    large = PUTS_BYTES_MAX + 1
    ends = [0, 21, 42, 63, 63 + large, 84 + large]
    assert plan_spans(ends, 1, 5, java) == [
        BatchSpan(1, 3, is_mput=False),
        BatchSpan(3, 4, is_mput=False),
        BatchSpan(4, 5, is_mput=False),
    ]
    assert plan_spans(ends, 0, 2, java, 1) == [
        BatchSpan(0, 1, is_mput=False),
        BatchSpan(1, 2, is_mput=False),
    ]
    many = range(0, 21 * PUTS_MAX + 22, 21)
    spans = plan_spans(many, 0, PUTS_MAX + 1, java)
    assert [span.end - span.first for span in spans] == [PUTS_MAX, 1]
