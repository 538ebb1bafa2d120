"""Ids and decisions of exactly-once writes, and what follows from them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.model import BrokerId, XaTransactionId
from metaq.protocol.transaction_ids import format_key, parse_key
from metaq.spark.errors import DecisionError
from metaq.spark.sink.decisions import (
    ATTEMPT_MAX,
    DECISION_BYTES_MAX,
    FORMAT_ID,
    SUM_LIMIT,
    Decision,
    QueryRecord,
    RowSum,
    TaskBranch,
    branch_xid,
    parse_xid,
    plan_recovery,
)

QUERY = "0f8fad5b-d9cb-469f-a165-70867728950e"
OTHER = "7c9e6679-7425-40de-944b-e07fc1f90ae7"
NAME = "sink-0123456789abcdef01234567"
B0, B1, B2 = map(BrokerId, range(3))

GOLDEN_XID = (
    "XID:1297175345:0f8fad5bd9cb469fa16570867728950e0000000000000007"
    ":0000000389abcdef:sink-0123456789abcdef01234567"
)
GOLDEN_RECORD = (
    b'{"turn":"5f0c93a1d2b4e687","place":"/c\\u00e9","query":'
    b'"0f8fad5b-d9cb-469f-a165-70867728950e","batch":7,"branches":'
    b'{"0,2":{"0":"89abcdef","3":"00000001"},"1":{"1":"ffffffff"}}}'
)
DECISION = Decision(
    QUERY,
    7,
    (
        TaskBranch(0, 0x89ABCDEF, (B0, B2)),
        TaskBranch(1, ATTEMPT_MAX, (B1,)),
        TaskBranch(3, 1, (B0, B2)),
    ),
)


def xid(
    task: int, attempt: int = 1, *, batch: int = 7, query: str = QUERY
) -> XaTransactionId:
    return branch_xid(NAME, query, batch, TaskBranch(task, attempt, ()))


def test_ids_are_as_they_were() -> None:
    """Brokers keep them over versions of this package."""
    found = xid(3, 0x89ABCDEF)
    assert format_key(found) == GOLDEN_XID
    assert parse_key(GOLDEN_XID) == found
    assert parse_xid(found) == (QUERY, 7, 3, 0x89ABCDEF)


@pytest.mark.parametrize(
    "stranger",
    [
        XaTransactionId(42, b"global", b"branch", NAME),
        XaTransactionId(FORMAT_ID, b"", b"", NAME),
        XaTransactionId(FORMAT_ID, bytes(24), bytes(9), NAME),
        XaTransactionId(FORMAT_ID - 1, bytes(24), bytes(8), NAME),
    ],
)
def test_other_ids_are_none_of_ours(stranger: XaTransactionId) -> None:
    """Neither committed nor rolled back, with any qualifier."""
    assert parse_xid(stranger) is None
    assert plan_recovery({B0: [stranger]}, DECISION, NAME) == ((), (), ())


def test_a_decision_is_written_as_it_was() -> None:
    """ZooKeeper keeps it over versions of this package."""
    record = QueryRecord("5f0c93a1d2b4e687", "/cé", DECISION)
    assert record.encode() == GOLDEN_RECORD
    assert QueryRecord.decode(GOLDEN_RECORD) == record
    summed = replace(DECISION, rows=RowSum(350, 0x07A1F3C8))
    record = QueryRecord("5f0c93a1d2b4e687", "/cé", summed)
    golden = GOLDEN_RECORD[:-1] + b',"rows":350,"sum":"0000000007a1f3c8"}'
    assert record.encode() == golden
    assert QueryRecord.decode(golden) == record
    fresh = QueryRecord("00", "/c")
    assert fresh.encode() == b'{"turn":"00","place":"/c"}'
    assert QueryRecord.decode(fresh.encode()) == fresh
    assert QueryRecord.decode(None) == QueryRecord()


branches = st.builds(
    TaskBranch,
    st.integers(0, 2**32 - 1),
    st.integers(0, ATTEMPT_MAX),
    st.sets(st.integers(0, 1023).map(BrokerId), min_size=1, max_size=4).map(
        lambda found: tuple(sorted(found))
    ),
)
decisions = st.builds(
    Decision,
    st.uuids().map(str),
    st.integers(0, 2**63 - 1),
    st.lists(branches, max_size=20, unique_by=lambda one: one.task).map(
        lambda found: tuple(sorted(found))
    ),
    st.none() | st.builds(RowSum, st.integers(0, 2**63), st.integers(0, SUM_LIMIT - 1)),
)


@pytest.mark.slow
@given(decisions, st.text(max_size=50))
def test_what_is_written_is_read(decision: Decision, place: str) -> None:
    record = QueryRecord("turn", place, decision)
    assert QueryRecord.decode(record.encode()) == record
    for found in decision.xids(NAME):
        parts = parse_xid(found)
        assert parts is not None
        assert (parts.query, parts.batch) == (decision.query, decision.batch)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"turn":"1"}',
        GOLDEN_RECORD[:-1],
        GOLDEN_RECORD.replace(b"0f8fad5b", b"zzzzzzzz"),
        GOLDEN_RECORD.replace(b'"89abcdef"', b'"attempt"'),
        GOLDEN_RECORD.replace(b'"batch":7', b'"batch":"7"'),
        GOLDEN_RECORD.replace(b'"batch":7', b'"batch":7,"rows":350'),
        GOLDEN_RECORD.replace(b'"batch":7', b'"batch":7,"rows":"350","sum":"1"'),
        GOLDEN_RECORD.replace(b'"branches":{', b'"branches":[{').replace(
            b"}}}", b"}}]}"
        ),
    ],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    """Nothing is decided, and nothing rolled back, by what cannot be read."""
    with pytest.raises(DecisionError, match="expected the decision"):
        QueryRecord.decode(data)


@pytest.mark.slow
def test_a_decision_that_zookeeper_would_not_take_is_refused() -> None:
    """The sentence names both numbers, and what helps."""
    many = tuple(TaskBranch(task, ATTEMPT_MAX, (B0,)) for task in range(60_000))
    record = QueryRecord("turn", "place", Decision(QUERY, 7, many))
    with pytest.raises(DecisionError, match=rf"60000.*{DECISION_BYTES_MAX}.*coal"):
        record.encode()
    fitting = Decision(QUERY, 7, many[:50_000], RowSum(2**63, SUM_LIMIT - 1))
    assert len(QueryRecord("turn", "place", fitting).encode()) <= DECISION_BYTES_MAX


RECOVERIES = {
    "named": (xid(1, ATTEMPT_MAX), B1, "commit"),
    "named, at a broker that has no part": (xid(1, ATTEMPT_MAX), B0, "superseded"),
    "another attempt": (xid(1, 5), B1, "superseded"),
    "another task": (xid(9), B0, "superseded"),
    "a batch before": (xid(0, 0x89ABCDEF, batch=6), B0, "superseded"),
    "a later batch": (xid(0, 0x89ABCDEF, batch=8), B0, "undecided"),
    "another query": (xid(0, 0x89ABCDEF, query=OTHER), B0, "undecided"),
}


@pytest.mark.parametrize("case", RECOVERIES)
def test_what_is_prepared_goes_by_the_decision(case: str) -> None:
    found, broker_id, wanted = RECOVERIES[case]
    plan = plan_recovery({broker_id: [found]}, DECISION, NAME)
    assert getattr(plan, wanted) == ((broker_id, found),)
    assert sum(map(len, plan)) == 1
    without = plan_recovery({broker_id: [found]}, None, NAME)
    assert without.undecided == ((broker_id, found),)
    assert plan_recovery({broker_id: [found]}, DECISION, "sink-another") == ((), (), ())


@pytest.mark.slow
@given(
    decisions,
    st.dictionaries(
        st.integers(0, 3).map(BrokerId),
        st.lists(
            st.builds(
                xid, st.integers(0, 3), st.integers(0, 3), batch=st.integers(0, 2)
            )
        ),
    ),
    st.data(),
)
def test_each_branch_has_one_fate(
    decision: Decision,
    found: dict[BrokerId, list[XaTransactionId]],
    data: st.DataObject,
) -> None:
    """Committed is exactly what is named; nothing else of the query is left."""
    named = decision.xids(NAME)
    for one, brokers in named.items():
        if data.draw(st.booleans()):
            found.setdefault(brokers[0], []).append(one)
    plan = plan_recovery(found, decision, NAME)
    everything = {(broker, one) for broker, some in found.items() for one in some}
    assert {placed for some in plan for placed in some} == everything
    assert set(plan.commit) == {
        (broker, one) for broker, one in everything if broker in named.get(one, ())
    }
    for _, one in plan.superseded:
        parts = parse_xid(one)
        assert parts is not None
        assert decision.covers(parts.query, parts.batch)
