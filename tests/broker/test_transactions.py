"""Transactions over the wire: connections that end, restarts, administration."""

import asyncio
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from metaq.broker.dispatch import dispatch_in_steps
from metaq.broker.health import describe_health
from metaq.broker.orders import perform
from metaq.broker.session import Session
from metaq.broker.single_puts import SinglePuts
from metaq.clock import SystemClock
from metaq.errors import LogDirLockedError, TransactionError
from metaq.net.channel import Channel
from metaq.protocol.commands import CommitTogether
from tests.broker.delay_rig import FakeSession
from tests.rigs.broker import Peer, running_broker

XID = b"XID:1:0a::uq"
TRIES = range(1, 21)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


class LateClock(SystemClock):
    """The machine's clock, ahead by what a test says."""

    late_ms = 0

    def wall_ms(self) -> Any:
        return super().wall_ms() + self.late_ms

    def monotonic_s(self) -> float:
        return super().monotonic_s() + self.late_ms / 1000


def command(key: bytes, words: bytes) -> bytes:
    return b"transaction %b s %b 1\r\n" % (key, words)


def put(key: bytes, data: bytes, partition: int = 0) -> bytes:
    return b"put test %d %d 0 -1 %b 2\r\n%b" % (partition, len(data), key, data)


async def good(peer: Peer, data: bytes) -> bytes:
    answer = await peer.ask(data)
    assert answer.startswith(b"result 200 "), answer
    return answer.partition(b"\r\n")[2]


async def stored(peer: Peer, partition: int = 0) -> bytes:
    return await peer.ask(b"get test g %d 0 10000 3\r\n" % partition)


def test_a_connection_that_ends_takes_its_local_transactions_along(
    data_dir: Path,
) -> None:
    """Rolled back, journalled as such, and counted; those of others go on."""

    async def scenario() -> None:
        async with running_broker(data_dir) as broker, Peer(broker) as other:
            async with Peer(broker) as peer:
                for key, each in ((b"TX:a:1", peer), (b"TX:b:1", other)):
                    await good(each, command(key, b"BEGIN"))
                    await good(each, put(key, key))
                await good(peer, command(XID, b"BEGIN"))
                await good(peer, put(XID, b"global"))
                await peer.ask(b"quit\r\n")
            assert broker.context.transactions.counters.abandoned == 1
            keys = [view.key for view in broker.context.transactions.views()]
            assert keys == ["TX:b:1", XID.decode()]
            await good(other, command(b"TX:b:1", b"COMMIT_ONE_PHASE"))
            await good(other, command(XID, b"COMMIT_ONE_PHASE"))
            found = await stored(other)
            assert b"TX:a:1" not in found
            assert found.index(b"TX:b:1") < found.index(b"global")

    run(scenario())


def test_an_xid_in_use_is_not_begun_again(data_dir: Path) -> None:
    """Two connections that used one would mix their messages: before the prepare,
    behind it, behind a restart, and when the first one is gone. Verdicts come from any.
    """
    begin, text = command(XID, b"BEGIN"), b"XAException:code=-8,msg=XA transaction '"
    refused = text + XID + b"' is in use: %b."

    async def before() -> None:
        async with running_broker(data_dir) as broker, Peer(broker) as other:
            async with Peer(broker) as peer:
                await good(peer, begin)
                assert refused % b"started" in await other.ask(begin)
                await good(peer, begin)
                of_another = begin.replace(b" s ", b" other ")
                assert refused % b"started" in await peer.ask(of_another)
                await good(peer, put(XID, b"mine"))
                await good(peer, begin)
                assert b"is open elsewhere." in await other.ask(put(XID, b"not mine"))
                await peer.ask(b"quit\r\n")
            assert refused % b"in use" in await other.ask(begin)
            assert b"is open elsewhere." in await other.ask(put(XID, b"not mine"))
            assert await good(other, command(XID, b"PREPARE")) == b"0"
            assert refused % b"prepared" in await other.ask(begin)

    async def behind() -> None:
        async with running_broker(data_dir) as broker, Peer(broker) as peer:
            assert refused % b"prepared" in await peer.ask(begin)
            await good(peer, command(XID, b"COMMIT_TWO_PHASE"))
            found = await stored(peer)
            assert b"mine" in found
            assert b"not mine" not in found
            await good(peer, begin)

    run(before())
    run(behind())


def test_a_journal_has_one_broker(tmp_path: Path) -> None:
    """A second one with the same `dataLogPath` does not start beside the first one."""
    journal = {"dataLogPath": str(tmp_path / "journal")}

    async def scenario() -> None:
        async with running_broker(tmp_path / "one", journal):
            with pytest.raises(LogDirLockedError, match="journal/transactions pid="):
                async with running_broker(tmp_path / "two", journal):
                    pass
        async with running_broker(tmp_path / "two", journal) as broker:
            assert broker.context.transactions.figures().offline_cause is None

    run(scenario())


def test_what_is_prepared_survives_a_restart_and_nothing_else(data_dir: Path) -> None:
    """Over two partitions: nothing of it before the commit, all of it behind."""

    async def before() -> None:
        async with running_broker(data_dir) as broker, Peer(broker) as peer:
            for key in (XID, b"XID:1:0b::uq", b"TX:s:1"):
                await good(peer, command(key, b"BEGIN"))
                await good(peer, put(key, key + b" one"))
                await good(peer, put(key, key + b" two", 1))
            assert await good(peer, command(XID, b"PREPARE")) == b"0"

    async def behind() -> None:
        async with running_broker(data_dir) as broker, Peer(broker) as peer:
            assert await good(peer, command(b"null", b"RECOVER")) == XID
            await good(peer, b"put test 0 6 0 -1 4\r\nbetween"[:-1])
            await good(peer, command(XID, b"COMMIT_TWO_PHASE"))
            first, second = await stored(peer), await stored(peer, 1)
            assert first.index(b"betwee") < first.index(XID + b" one")
            assert XID + b" two" in second
            assert b"TX:s:1" not in first + second
            assert b"0b" not in first + second

    run(before())
    run(behind())


def test_a_transaction_runs_out_of_time(data_dir: Path) -> None:
    """No longer than the broker's own bound; one that is prepared has the time that it
    takes, and raises an alarm when it takes too long.
    """
    clock = LateClock()

    async def scenario() -> None:
        async with (
            running_broker(
                data_dir, {"maxTxTimeoutInSeconds": "5"}, clock=clock
            ) as broker,
            Peer(broker) as peer,
        ):
            for key in (XID, b"TX:s:1"):
                await good(peer, command(key, b"BEGIN 1000"))
                await good(peer, put(key, b"x"))
            await good(peer, command(XID, b"PREPARE"))
            clock.late_ms = 6000
            answer = await peer.ask(command(b"TX:s:1", b"COMMIT_ONE_PHASE"))
            assert b"'TX:s:1' has not been started." in answer
            assert describe_health(broker.control.status())["status"] == "ok"
            clock.late_ms = 700_000
            (problem,) = describe_health(broker.control.status())["problems"]  # type: ignore[misc, var-annotated]
            assert problem["alarm"] == "transactions_in_doubt"
            # The other connection was idle for too long by this clock.
            async with Peer(broker) as manager:
                await good(manager, command(XID, b"COMMIT_TWO_PHASE"))
            assert describe_health(broker.control.status())["status"] == "ok"

    run(scenario())


def test_one_without_a_time_out_that_was_left_open_rings_until_it_is_rolled_back(
    data_dir: Path,
) -> None:
    """It stayed until a restart, with its key and its puts, and no alarm."""
    clock = LateClock()

    async def scenario() -> None:
        async with running_broker(data_dir, clock=clock) as broker:
            async with Peer(broker) as peer:
                await good(peer, command(XID, b"BEGIN"))
                await good(peer, put(XID, b"x"))
            clock.late_ms = 700_000
            (problem,) = describe_health(broker.control.status())["problems"]  # type: ignore[misc, var-annotated]
            assert problem["alarm"] == "transactions_left_open"
            assert "that are not ended: 1, the oldest" in problem["text"]
            (view,) = broker.context.transactions.views()
            await perform(broker.control, {**END, "key": view.key, "as": "rollback"})
            assert describe_health(broker.control.status())["status"] == "ok"
            async with Peer(broker) as peer:
                answer = await peer.ask(command(XID, b"COMMIT_ONE_PHASE"))
                assert b"has not been started" in answer
                await good(peer, command(XID, b"BEGIN"))

    run(scenario())


END = {"command": "end_transaction", "as": "commit"}


def test_an_operator_ends_what_is_in_doubt(data_dir: Path) -> None:
    """By command; the coordinator that comes back is told by its code, until FORGET."""

    async def scenario() -> None:
        async with running_broker(data_dir) as broker, Peer(broker) as peer:
            for words in (command(XID, b"BEGIN"), put(XID, b"decided")):
                await good(peer, words)
            await good(peer, command(XID, b"PREPARE"))
            (view,) = broker.context.transactions.views()
            assert (view.key, view.state) == (XID.decode(), "prepared")
            assert (view.put_count, view.partitions) == (1, ("test-0",))
            with pytest.raises(TransactionError, match="has not been started"):
                await perform(broker.control, {**END, "key": "XID:9:::uq"})
            await perform(broker.control, {**END, "key": XID.decode()})
            assert b"decided" in await stored(peer)
            answer = await peer.ask(command(XID, b"COMMIT_TWO_PHASE"))
            assert b"XAException:code=7,msg=XA transaction" in answer
            assert await good(peer, command(b"null", b"RECOVER")) == XID
            await good(peer, command(XID, b"FORGET"))
            assert await good(peer, command(b"null", b"RECOVER")) == b""
            assert not broker.context.transactions.views()

    run(scenario())


def test_a_commit_of_pipelined_puts_has_them_all(data_dir: Path) -> None:
    """All in one write: each is answered, and stored in the order of the puts."""

    async def scenario() -> None:
        async with running_broker(data_dir) as broker, Peer(broker) as peer:
            key = b"TX:s:1"
            puts = b"".join(
                put(key, b"%03d" % number, number % 2) for number in range(200)
            )
            answer = await peer.ask(
                command(key, b"BEGIN") + puts + command(key, b"COMMIT_ONE_PHASE")
            )
            assert answer.count(b"result 200 ") == 202
            for partition in (0, 1):
                found = await stored(peer, partition)
                numbers = [b"%03d" % n for n in range(partition, 200, 2)]
                places = [found.index(number) for number in numbers]
                assert places == sorted(places)
            lines = (await peer.ask(b"stats\r\n")).split(b"\r\n")
            assert b"tx_begin 1" in lines
            assert b"tx_commit 1" in lines

    run(scenario())


def test_stats_count_the_begin_of_every_transaction(data_dir: Path) -> None:
    """As MetaQ does: `tx_begin` has XA ones too, `tx_xa_begin` these alone."""

    async def scenario() -> None:
        async with running_broker(data_dir) as broker, Peer(broker) as peer:
            for key in (b"TX:s:1", XID):
                await good(peer, command(key, b"BEGIN"))
            lines = (await peer.ask(b"stats\r\n")).split(b"\r\n")
            assert b"tx_begin 2" in lines
            assert b"tx_xa_begin 1" in lines

    run(scenario())


def test_a_begin_is_answered_whatever_follows_it(data_dir: Path) -> None:
    """With its puts where they come in one piece, and not later than now where a put
    is only half there, or refused at once.
    """

    async def scenario() -> None:
        async with running_broker(data_dir) as broker, Peer(broker) as peer:
            half = put(b"TX:s:1", b"half")
            answer = await peer.ask(command(b"TX:s:1", b"BEGIN") + half[:-2])
            assert answer.count(b"result 200 ") == 1
            assert (await peer.ask(half[-2:])).count(b"result 200 ") == 1
            refused = b"put none 0 1 0 -1 TX:s:2 5\r\nx"
            answer = await peer.ask(command(b"TX:s:2", b"BEGIN") + refused)
            assert [line.split(b" ")[1] for line in answer.split(b"result")[1:]] == [
                b"200",
                b"500",
            ]

    run(scenario())


def test_a_transaction_in_one_piece_has_one_reply(data_dir: Path) -> None:
    """Begin, puts and verdict are answered by one packet, however they are read."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(False)

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with running_broker(data_dir) as broker:
            channel = Channel(ours, loop=loop, clock=SystemClock(), room_bytes=1 << 20)
            single_puts = SinglePuts(broker.context, loop.call_soon)
            session = Session(
                channel, broker.context, single_puts, on_closed=lambda _session: None
            )
            session.start()

            async def packets(key: bytes, verdict: bytes) -> int:
                words = (command(key, b"BEGIN"), put(key, b"one"), put(key, b"two"))
                theirs.send(b"".join((*words, command(key, verdict))))
                count = replies = 0
                while replies < 4:
                    packet = await loop.sock_recv(theirs, 1 << 16)
                    count, replies = count + 1, replies + packet.count(b"result 200 ")
                return count

            # A turn of the loop that takes too long ends early, and sends what it has.
            local = [await packets(b"TX:s:%d" % n, b"COMMIT_ONE_PHASE") for n in TRIES]
            xa = [await packets(b"XID:1:%02x::uq" % n, b"PREPARE") for n in TRIES]
            assert min(local) == min(xa) == 1
            session.end("over")

    with ours, theirs:
        run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("first", [b"COMMIT_TWO_PHASE", b"ROLLBACK"])
def test_two_coordinators_race_for_one_xid(data_dir: Path, first: bytes) -> None:
    """Both verdicts at once, on two connections: one is carried out, all of it, and the
    other is refused. The same verdict twice is carried out once, and told twice.
    """
    second = b"ROLLBACK" if first == b"COMMIT_TWO_PHASE" else b"COMMIT_TWO_PHASE"

    async def scenario() -> None:
        async with (
            running_broker(data_dir) as broker,
            Peer(broker) as one,
            Peer(broker) as other,
        ):
            for number in range(20):
                key = b"XID:1:%04x::uq" % number
                await good(one, command(key, b"BEGIN"))
                for partition in (0, 1):
                    await good(one, put(key, b"<%04d>" % number, partition))
                await good(one, command(key, b"PREPARE"))
                verdicts = (first, first) if number % 2 else (first, second)
                answers = await asyncio.gather(
                    one.ask(command(key, verdicts[0])),
                    other.ask(command(key, verdicts[1])),
                )
                said = [b"result 200 " in answer for answer in answers]
                done = {verdicts[at] for at, is_good in enumerate(said) if is_good}
                assert len(done) == 1, answers
                wanted = int(done == {b"COMMIT_TWO_PHASE"})
                for partition in (0, 1):
                    found = await stored(one, partition)
                    assert found.count(b"<%04d>" % number) == wanted, answers
                for answer, is_good in zip(answers, said, strict=True):
                    assert is_good or b"XAException:code=-" in answer, answer
            assert await good(one, command(b"null", b"RECOVER")) == b""

    run(scenario())


def test_a_late_commit_of_an_old_transaction_is_unknown(data_dir: Path) -> None:
    """Ended by a time-out, a rollback, a commit, a lost connection or a restart: the
    commit that comes then does nothing, and is told so.
    """
    clock = LateClock()
    local, xa = b"TX:s:%d", b"XID:1:%04x::uq"

    async def late(peer: Peer, *numbers: int) -> None:
        for number in numbers:
            for key in (local % number, xa % number):
                for words in (b"COMMIT_ONE_PHASE", b"COMMIT_TWO_PHASE"):
                    answer = await peer.ask(command(key, words))
                    assert b"'%b' has not been started." % key in answer
        found = await stored(peer)
        assert found.count(b"old") == 2

    async def begin(peer: Peer, number: int, words: bytes = b"BEGIN") -> None:
        for key in (local % number, xa % number):
            await good(peer, command(key, words))
            await good(peer, put(key, b"old"))

    async def before() -> None:
        async with (
            running_broker(data_dir, clock=clock) as broker,
            Peer(broker) as peer,
        ):
            await begin(peer, 1, b"BEGIN 5")
            await begin(peer, 2)
            await begin(peer, 3)
            for number, verdict in ((2, b"ROLLBACK"), (3, b"COMMIT_ONE_PHASE")):
                await good(peer, command(local % number, verdict))
                await good(peer, command(xa % number, verdict))
            await begin(peer, 4)
            clock.late_ms = 6000
            await late(peer, 1, 2, 3)

    async def behind() -> None:
        async with (
            running_broker(data_dir, clock=clock) as broker,
            Peer(broker) as peer,
        ):
            await late(peer, 1, 2, 3, 4)

    run(before())
    run(behind())


def test_commits_together_are_seen_whole_by_a_reader_that_looks_all_the_time(
    data_dir: Path,
) -> None:
    """Whatever of the partition it gets, of each command's puts it is all or none."""
    keys = [b"XID:1:%02x::uq" % number for number in range(3)]
    filler = b"x" * 2000
    seen: set[int] = set()

    async def watch(reader: Peer) -> None:
        while True:
            found = await stored(reader)
            seen.add(found.count(filler))

    async def scenario() -> None:
        async with (
            running_broker(data_dir) as broker,
            Peer(broker) as peer,
            Peer(broker) as reader,
        ):
            for key in keys:
                await good(peer, command(key, b"BEGIN"))
                await good(peer, put(key, filler))
                await good(peer, command(key, b"PREPARE"))
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(watch(reader))
                lines = b"".join(key + b"\r\n" for key in (*keys, b"XID:1:ff::uq"))
                line = b"transactions s COMMIT_TOGETHER 4 %d 9\r\n" % len(lines)
                told = (await good(peer, line + lines)).split(b"\r\n")
                assert told[:3] == [b"0"] * 3
                assert told[3].startswith(b"XAException:code=-4,msg=XA transaction")
                assert (await stored(peer)).count(filler) == 3
                watching.cancel()
            assert seen <= {0, 3}, seen

    run(scenario())


@pytest.mark.parametrize("lines", [b"XID:1:0a::uq\r\n", b"XID:1:0a\r\nnull\r\n"])
def test_what_are_no_keys_is_refused_and_the_talk_goes_on(
    data_dir: Path, lines: bytes
) -> None:
    """Another number of them, or something else: nothing is committed."""

    async def scenario() -> None:
        async with running_broker(data_dir) as broker, Peer(broker) as peer:
            line = b"transactions s COMMIT_TOGETHER 2 %d 9\r\n" % len(lines)
            answer = await peer.ask(line + lines)
            assert answer.startswith(b"result 500 ")
            assert b" 9\r\ntransaction key" in answer
            assert await good(peer, command(b"null", b"RECOVER")) == b""

    run(scenario())


def test_many_keys_of_one_command_are_read_in_steps(data_dir: Path) -> None:
    """Others are served in between; nothing is committed before the last one."""

    async def main() -> None:
        async with running_broker(data_dir) as broker:
            keys = b"".join(b"XID:1:%02x::uq\r\n" % (k % 256) for k in range(1024))
            together = CommitTogether("s", 1024, 9, keys)
            session = FakeSession(broker.context)
            steps = dispatch_in_steps(together, session)
            assert len(list(steps)) == 4
            (reply,) = session.replies
            assert reply.count(b"has not been started") == 1024

    run(main())
