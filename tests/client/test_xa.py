"""XA transactions in both worlds: prepared anywhere, committed by any client, once."""

from collections.abc import Iterator
from typing import Any

import pytest

from metaq.client import (
    ConfigError,
    HeuristicError,
    NoBrokerError,
    TransactionError,
    TransactionInDoubtError,
    TransactionRolledBackError,
    UnknownXidError,
    XaTransactionId,
)
from metaq.client.errors import XaError
from metaq.errors import MetaqError
from metaq.model import BrokerId
from metaq.testing.fake_broker import FaultKind
from metaq.testing.zk import MemoryZooKeeper
from metaq.txn.state import HeuristicOutcome
from metaq.zk.paths import NodePaths
from tests.brokers import StartBroker
from tests.client.worlds import QUICK, WORLDS
from tests.rigs.waiting import wait_until

ONE_BROKER = {
    "fakes": "what a client meets on MetaQ 1.4 and what fails on cue; tests/java has"
    " the real one",
}


@pytest.fixture
def zookeeper() -> MemoryZooKeeper:
    return MemoryZooKeeper()


@pytest.fixture
def fakes(start_metaq_1_4: StartBroker, zookeeper: MemoryZooKeeper) -> list[Any]:
    """Two brokers that both have topic "test"."""
    made = [
        start_metaq_1_4({"test": 1}, zookeeper=zookeeper, broker_id=number)
        for number in (0, 1)
    ]
    return [one.inner for one in made]  # type: ignore[attr-defined]


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest) -> Any:
    return WORLDS[request.param]


@pytest.fixture
def client(world: Any, fakes: list[Any], zookeeper: MemoryZooKeeper) -> Iterator[Any]:
    with world(coordinator=zookeeper.coordinator, **QUICK) as client:
        wait_until(lambda: is_known(client, len(fakes)))
        yield client


@pytest.fixture
def xa(client: Any) -> Iterator[Any]:
    with client.xa(qualifier="billing-1") as xa:
        yield xa


def is_known(client: Any, count: int) -> bool:
    """Tell whether so many brokers are registered, as far as the client knows."""
    try:
        return len(client.stats(timeout=0.1)) == count
    except MetaqError:
        return False


def stored(fakes: list[Any]) -> list[list[bytes]]:
    return [one.payloads() for one in fakes]


def prepare_both(xa: Any, xid: XaTransactionId) -> None:
    """Leave a transaction prepared at both brokers."""
    xa.begin(xid)
    xa.send("test", b"zero", partition="0-0")
    xa.send("test", b"one", partition="1-0")
    assert xa.prepare()


BOTH = [[b"zero"], [b"one"]]
NONE: list[list[bytes]] = [[], []]


def test_one_transaction_has_a_branch_at_each_of_its_brokers(
    xa: Any, fakes: list[Any]
) -> None:
    """The same xid; nothing is read before the commit."""
    xid = xa.xid(42, "global-id", "branch-1")
    prepare_both(xa, xid)
    key = "XID:42:676c6f62616c2d6964:6272616e63682d31:billing-1"
    assert [one.transactions() for one in fakes] == [[key], [key]]
    assert stored(fakes) == NONE
    xa.commit(xid)
    assert stored(fakes) == BOTH
    assert xa.recover() == []


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_another_process_says_the_verdict(
    client: Any, xa: Any, fakes: list[Any], end: str
) -> None:
    """It finds what is prepared under its qualifier, and nothing else."""
    with client.xa(qualifier="other") as other:
        other.begin(other.xid(1, "theirs"))
        other.send("test", b"theirs")
        other.prepare()
        prepare_both(xa, xa.xid(1, "mine", b"\x00\xff"))
        xa.close()
        with client.xa(qualifier="billing-1") as again:
            (xid,) = again.recover()
            assert (xid.format_id, xid.global_id, xid.branch) == (
                1,
                b"mine",
                b"\x00\xff",
            )
            getattr(again, end)(xid)
            assert again.recover() == []
            with pytest.raises(UnknownXidError, match="no broker knows"):
                getattr(again, end)(xid)
        assert stored(fakes) == (BOTH if end == "commit" else NONE)
        assert len(other.recover()) == 1


def test_one_broker_commits_in_one_phase_and_two_do_not(
    xa: Any, fakes: list[Any]
) -> None:
    xa.begin(xa.xid(1, "a"))
    xa.send("test", b"zero", partition="0-0")
    xa.commit()
    assert stored(fakes) == [[b"zero"], []]
    xa.begin(xa.xid(1, "b"))
    xa.send_many("test", [b"x", b"y"])
    with pytest.raises(TransactionError, match="at brokers 0, 1: prepare it"):
        xa.commit()
    xa.rollback()
    assert stored(fakes) == [[b"zero"], []]
    assert [one.transactions() for one in fakes] == NONE


def test_what_is_out_of_order_is_refused_here(xa: Any, fakes: list[Any]) -> None:
    """A MetaQ 1.4 broker acknowledges a message after PREPARE, and loses it."""
    xid = xa.xid(1, "a")
    for call in (xa.prepare, xa.commit, xa.rollback):
        with pytest.raises(TransactionError, match="begin one"):
            call()
    with pytest.raises(TransactionError, match="begin one"):
        xa.send("test", b"x")
    xa.begin(xid)
    for call in (xa.begin, xa.commit, xa.rollback):
        with pytest.raises(TransactionError, match="XID:1:61::billing-1 has not ended"):
            call(xa.xid(1, "b"))
    xa.send("test", b"x", partition="0-0")
    xa.prepare()
    with pytest.raises(TransactionError, match="takes no more messages"):
        xa.send("test", b"late", partition="0-0")
    with pytest.raises(TransactionError, match="prepared already"):
        xa.prepare()
    xa.commit()
    assert stored(fakes) == [[b"x"], []]


def test_an_empty_transaction_has_nothing_to_commit(xa: Any, fakes: list[Any]) -> None:
    """No broker hears of it, and the shape of the calls is the same."""
    xid = xa.xid(1, "a")
    xa.begin(xid)
    assert xa.prepare() is False
    xa.commit(xid)
    assert "begin" not in fakes[0].statistics().commands


def test_a_read_only_vote_ends_the_branch(xa: Any, fakes: list[Any]) -> None:
    """A broker that has nothing of it is not asked to commit."""
    xid = xa.xid(1, "a")
    xa.begin(xid)
    xa.send("test", b"zero", partition="0-0")
    fakes[1].inject(FaultKind.REFUSE, verb="prepare", status=200, body=b"3")
    xa.send("test", b"one", partition="1-0")
    assert xa.prepare()
    xa.commit(xid)
    assert stored(fakes) == [[b"zero"], []]
    assert fakes[1].statistics().commands["commit_two_phase"] == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((-1, "g", "b"), "format_id"),
        ((2**31, "g", "b"), "format_id"),
        ((True, "g", "b"), "format_id"),
        ((1, "g" * 65, "b"), "global_id"),
        ((1, "g", b"b" * 65), "branch"),
    ],
)
def test_ids_have_the_ranges_of_xa(xa: Any, arguments: Any, named: str) -> None:
    with pytest.raises((TypeError, ConfigError), match=named):
        xa.xid(*arguments)


@pytest.mark.parametrize("wrong", [5, None, ["g"]])
def test_ids_are_texts_or_bytes(xa: Any, wrong: Any) -> None:
    """Of a number Python would make so many zeros: all numbers of a size one id."""
    with pytest.raises(TypeError, match="global_id: expected str or bytes"):
        xa.xid(1, wrong)
    with pytest.raises(TypeError, match="branch: expected str or bytes"):
        xa.xid(1, "g", wrong)


@pytest.mark.parametrize("wrong", ["", " ", "a b", "a:b", "a\r\n", "a\tb", 5, None])
def test_a_qualifier_is_a_name(client: Any, wrong: Any) -> None:
    with pytest.raises((TypeError, ConfigError), match="qualifier"):
        client.xa(qualifier=wrong)


def test_an_xid_of_another_qualifier_is_refused(client: Any, xa: Any) -> None:
    foreign = XaTransactionId(1, b"g", b"b", "other")
    for call in (xa.begin, xa.commit, xa.rollback, xa.forget):
        with pytest.raises(ConfigError, match="billing-1"):
            call(foreign)


def test_a_qualifier_of_digits_is_no_timeout(client: Any, fakes: list[Any]) -> None:
    with client.xa(qualifier="60") as xa:
        prepare_both(xa, xa.xid(1, "a"))
        (xid,) = xa.recover()
        xa.commit(xid)
    assert stored(fakes) == BOTH


# -- what goes wrong ------------------------------------------------------------------


def test_a_broker_that_does_not_promise_has_all_rolled_back(
    xa: Any, fakes: list[Any]
) -> None:
    xa.begin(xa.xid(1, "a"))
    xa.send_many("test", [b"x", b"y"])
    text = b"XAException:code=-3,msg=disk"
    fakes[1].inject(FaultKind.REFUSE, verb="prepare", body=text)
    with pytest.raises(TransactionRolledBackError, match=r"XAER_RMERR \(-3\): disk"):
        xa.prepare()
    assert [one.transactions() for one in fakes] == NONE
    xa.begin(xa.xid(1, "b"))


@pytest.mark.slow
def test_a_promise_that_nobody_heard_is_rolled_back_or_in_doubt(
    xa: Any, fakes: list[Any]
) -> None:
    xa.begin(xa.xid(1, "a"))
    xa.send_many("test", [b"x", b"y"])
    fakes[1].inject(FaultKind.DROP_STORED, verb="prepare")
    with pytest.raises(TransactionRolledBackError, match="is lost"):
        xa.prepare()
    assert [one.transactions() for one in fakes] == NONE
    xid = xa.xid(1, "b")
    xa.begin(xid)
    xa.send_many("test", [b"x", b"y"])
    fakes[1].inject(FaultKind.DROP_STORED, verb="prepare")
    fakes[1].inject(FaultKind.DROP, verb="rollback")
    with pytest.raises(TransactionInDoubtError, match="prepared at broker 1: roll it"):
        xa.prepare()
    assert xa.recover() == [xid]
    xa.rollback(xid)
    assert stored(fakes) == NONE


@pytest.mark.parametrize("fault", [FaultKind.DROP, FaultKind.DROP_STORED])
def test_a_verdict_without_an_answer_is_said_again(
    xa: Any, fakes: list[Any], fault: FaultKind
) -> None:
    """By the user: what a broker has done already it does not know any more."""
    xid = xa.xid(1, "a")
    prepare_both(xa, xid)
    fakes[1].inject(fault, verb="commit_two_phase")
    with pytest.raises(TransactionInDoubtError, match="not failed: say commit_two_ph"):
        xa.commit(xid)
    assert fakes[1].statistics().commands["commit_two_phase"] == 1
    if fault is FaultKind.DROP:
        fakes[1].inject(fault, verb="commit_two_phase")
        with pytest.raises(TransactionInDoubtError, match="again to broker 1"):
            xa.commit(xid)
        xa.commit(xid)
    else:
        with pytest.raises(UnknownXidError):
            xa.commit(xid)
    assert stored(fakes) == BOTH


def test_a_rollback_without_an_answer_is_in_doubt_where_a_broker_has_promised(
    xa: Any, fakes: list[Any]
) -> None:
    """One that was not prepared ends with its time at the broker."""
    xid = xa.xid(1, "a")
    prepare_both(xa, xid)
    fakes[1].inject(FaultKind.DROP, verb="rollback")
    with pytest.raises(TransactionInDoubtError, match="say rollback again to broker 1"):
        xa.rollback(xid)
    assert xa.recover() == [xid]
    xa.rollback(xid)
    xa.begin(xa.xid(1, "b"))
    xa.send("test", b"one", partition="1-0")
    fakes[1].inject(FaultKind.DROP, verb="rollback")
    xa.rollback()
    assert (stored(fakes), xa.recover()) == (NONE, [])


@pytest.mark.slow
def test_a_broker_that_is_away_leaves_a_doubt_until_it_is_back(
    client: Any, xa: Any, fakes: list[Any], zookeeper: MemoryZooKeeper
) -> None:
    """Its record names it: a broker of ours leaves one, and here the test does."""
    path = NodePaths().recorded_broker(fakes[1].broker_id)
    zookeeper.put(path, str(fakes[1].address).encode())
    xid = xa.xid(1, "a")
    prepare_both(xa, xid)
    xa.close()
    with client.xa(qualifier="billing-1") as again:
        fakes[1].go_away()
        wait_until(lambda: is_known(client, 1))
        with pytest.raises(NoBrokerError, match=r"broker 1 is away, .* partial=True"):
            again.recover()
        assert again.recover(partial=True) == [xid]
        with pytest.raises(TransactionInDoubtError, match="broker 1 is away"):
            again.commit(xid)
        assert stored(fakes) == [[b"zero"], []]
        with pytest.raises(NoBrokerError, match="broker 1"):
            again.forget(xid)
        fakes[1].come_back()
        wait_until(lambda: is_known(client, 2))
        assert again.recover() == [xid]
        again.commit(xid)
        assert stored(fakes) == BOTH


@pytest.mark.slow
@pytest.mark.parametrize("left", [1, 0])
def test_a_broker_without_a_record_leaves_a_doubt_too(
    client: Any, xa: Any, fakes: list[Any], zookeeper: MemoryZooKeeper, left: int
) -> None:
    """Issue 30, row 6: ZooKeeper came back without data, or no broker is there."""
    xid = xa.xid(1, "a")
    prepare_both(xa, xid)
    for away in fakes[left:]:
        away.go_away()
    wait_until(lambda: is_known(client, left))
    with pytest.raises(TransactionInDoubtError, match="broker"):
        xa.commit(xid)
    # Another object of the client has never spoken to them.
    with client.xa(qualifier="billing-1") as other:
        for one in (xa, other):
            with pytest.raises(TransactionInDoubtError, match="broker 1 is away, and"):
                one.commit(xid)
            with pytest.raises(NoBrokerError, match="broker 1 is away"):
                one.recover()
    for away in fakes[left:]:
        away.come_back()
    wait_until(lambda: is_known(client, 2))
    xa.commit(xid)
    assert stored(fakes) == BOTH
    with pytest.raises(UnknownXidError):
        xa.commit(xid)


def test_where_no_broker_was_ever_seen_nothing_is_unknown(world: Any) -> None:
    """A cluster that is down is no proof that a transaction has ended."""
    coordinator = MemoryZooKeeper().coordinator
    with (
        world(coordinator=coordinator, **QUICK) as client,
        client.xa(qualifier="billing-1") as xa,
    ):
        with pytest.raises(TransactionInDoubtError, match="every broker is away"):
            xa.commit(xa.xid(1, "a"))
        with pytest.raises(NoBrokerError, match="every broker is away"):
            xa.recover()


def test_what_the_catalog_once_knew_is_missed_when_it_is_empty(
    client: Any, xa: Any, fakes: list[Any], zookeeper: MemoryZooKeeper
) -> None:
    path = NodePaths().recorded_broker(BrokerId(7))
    zookeeper.put(path, str(fakes[1].address).encode())
    with pytest.raises(NoBrokerError, match="broker 7 is away"):
        xa.recover()
    zookeeper.wipe()
    with pytest.raises(TransactionInDoubtError, match="broker 7 is away"):
        xa.commit(xa.xid(1, "a"))


def test_what_is_not_prepared_ends_with_its_owner(
    client: Any, fakes: list[Any]
) -> None:
    xa = client.xa(qualifier="q")
    xa.begin(xa.xid(1, "a"))
    xa.send_many("test", [b"x", b"y"])
    xa.close()
    assert [one.transactions() for one in fakes] == NONE


def test_a_failed_message_lets_nothing_be_prepared(xa: Any, fakes: list[Any]) -> None:
    xa.begin(xa.xid(1, "a"))
    xa.send("test", b"zero", partition="0-0")
    fakes[1].inject(FaultKind.DROP_STORED)
    with pytest.raises(MetaqError, match="is lost"):
        xa.send("test", b"one", partition="1-0")
    with pytest.raises(TransactionError, match="can only be rolled back"):
        xa.send("test", b"two", partition="0-0")
    with pytest.raises(TransactionRolledBackError):
        xa.prepare()
    assert [one.transactions() for one in fakes] == NONE


def test_what_was_never_asked_to_prepare_is_no_doubt(xa: Any, fakes: list[Any]) -> None:
    """Even if its broker is not reached."""
    xa.begin(xa.xid(1, "a"))
    xa.send("test", b"one", partition="1-0")
    fakes[1].inject(FaultKind.REFUSE, body=b"disk")
    with pytest.raises(MetaqError, match="disk"):
        xa.send("test", b"two", partition="1-0")
    fakes[1].inject(FaultKind.DROP, verb="rollback")
    with pytest.raises(TransactionRolledBackError, match="disk"):
        xa.prepare()
    assert fakes[1].payloads() == []


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ({"kind": FaultKind.DROP_STORED}, TransactionInDoubtError),
        ({"kind": FaultKind.REFUSE, "body": b"IOException"}, TransactionInDoubtError),
        ({"kind": FaultKind.REFUSE, "status": 503}, TransactionRolledBackError),
        (
            {"kind": FaultKind.REFUSE, "body": b"XAException:code=-4,msg=x"},
            TransactionRolledBackError,
        ),
        ({"kind": FaultKind.REFUSE, "body": b"XAException:code=-3,msg=x"}, XaError),
    ],
)
def test_a_commit_in_one_phase_says_what_is_certain(
    xa: Any, fakes: list[Any], fault: Any, kind: type[Exception]
) -> None:
    xa.begin(xa.xid(1, "a"))
    xa.send("test", b"zero", partition="0-0")
    fakes[0].inject(verb="commit_one_phase", **fault)
    with pytest.raises(kind):
        xa.commit()


@pytest.mark.parametrize(
    ("outcome", "code", "word"),
    [
        (HeuristicOutcome.COMMIT, 7, "committed"),
        (HeuristicOutcome.ROLLBACK, 6, "rolled back"),
        (HeuristicOutcome.COMPLETE, 8, "completed"),
    ],
)
def test_an_operator_was_faster(
    xa: Any, fakes: list[Any], outcome: HeuristicOutcome, code: int, word: str
) -> None:
    """The error says how; it is listed until it is forgotten."""
    xid = xa.xid(1, "a")
    prepare_both(xa, xid)
    fakes[1].metaq.transactions.end(xid, outcome)
    with pytest.raises(HeuristicError, match=rf"broker 1: XA_HEUR.*{word}") as caught:
        xa.commit(xid)
    assert caught.value.code == code
    assert fakes[0].payloads() == [b"zero"]
    assert xa.recover() == [xid]
    xa.forget(xid)
    assert xa.recover() == []
