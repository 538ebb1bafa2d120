"""The transaction manager of exactly-once writes, killed at every step, and raced.

Tasks and drivers are functions, without Spark; brokers are real, ZooKeeper a fake."""

import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from itertools import count
from typing import Any, TypeVar
from unittest import mock

import pyarrow as pa
import pytest
from click import BadParameter
from hypothesis import given, settings
from hypothesis import strategies as st

from metaq.broker.admin_socket import call_admin
from metaq.cli.cluster import Target
from metaq.cli.transactions import settle as settle_write
from metaq.client import Client
from metaq.client.offsets import query_progress
from metaq.client.produce.branch_endings import FOREIGN_START_S
from metaq.client.produce.xa_commands import XaCommands
from metaq.client.session import AsyncClient
from metaq.errors import CoordinationError
from metaq.loop_thread import LoopThread
from metaq.model import BrokerId
from metaq.protocol.transaction_ids import format_key
from metaq.spark.errors import (
    IncompleteError,
    NoTransactionsError,
    SparkError,
    TakenOverError,
)
from metaq.spark.options import SinkOptions
from metaq.spark.sink import exactly_once
from metaq.spark.sink.decisions import (
    Decision,
    QueryRecord,
    TaskBranch,
    WriteTerms,
    branch_xid,
)
from metaq.spark.sink.exact_sink import BranchSender, ExactSink
from metaq.spark.sink.exactly_once import TransactionManager
from metaq.spark.sink.outbox import Written
from metaq.testing.embedded import EmbeddedBroker
from metaq.testing.fake_broker import FakeBroker, FaultKind
from metaq.testing.zk import MemoryZooKeeper
from metaq.zk.paths import NodePaths
from tests.client.worlds import parts_of
from tests.spark.brokers import data_of, own_clusters, stored, tp, watched

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NAME = "sink-steps"
PATIENCE_S = 60.0
TASKS = 2

T = TypeVar("T")


class KilledError(BaseException):
    """The driver was killed here."""


class Steps:
    """Acts of drivers of one query, one step after the other."""

    def __init__(self, client_options: Mapping[str, Any]) -> None:
        self._options = client_options
        self._thread = LoopThread("steps")
        self._client: AsyncClient | None = None

    def run(
        self,
        step: Callable[[TransactionManager], Awaitable[T]],
        *,
        patience_s: float = PATIENCE_S,
        foreign_start_s: float = FOREIGN_START_S,
    ) -> T:
        """Run one step of a driver."""

        async def work() -> T:
            if self._client is None:
                self._client = AsyncClient(**self._options, request_timeout_s=5.0)
                await self._client.start()
            context = parts_of(self._client)
            deadline_s = context.clock.monotonic_s() + patience_s
            return await step(
                TransactionManager(
                    context,
                    deadline_s,
                    name=NAME,
                    place="here",
                    draw_turn=lambda: uuid.uuid4().hex,
                    foreign_start_s=foreign_start_s,
                )
            )

        return self._thread.run(work())

    def close(self) -> None:
        """Close the client."""
        if self._client is not None:
            self._thread.run(self._client.close())
        self._thread.stop()


class Scene(Steps):
    """Two brokers, and drivers of one query that writes to them."""

    def __init__(self, brokers: list[EmbeddedBroker]) -> None:
        super().__init__(brokers[0].client_options)
        self.brokers = brokers
        self.query = str(uuid.uuid4())
        self.topic = f"t-{self.query[-12:]}"
        for broker in brokers:
            broker.create_topic(self.topic, 1)
        self._attempts = count(1)

    @property
    def target(self) -> Target:
        """The cluster, for a command."""
        return Target("", "/meta", (), PATIENCE_S, **self.brokers[0].client_options)

    def close(self) -> None:
        """Forget the decision, and close the client."""
        self.run(lambda manager: manager.begin(()))
        self.run(lambda manager: manager.forget())
        super().close()

    def prepare(self, batch: int, task: int) -> TaskBranch:
        """Run a task: one message to each broker."""
        attempt = next(self._attempts)
        branch = TaskBranch(task, attempt, ())
        xid = branch_xid(NAME, self.query, batch, branch)
        addresses = {BrokerId(n): b.address for n, b in enumerate(self.brokers)}
        with BranchSender(addresses, xid, timeout_s=PATIENCE_S) as sender:
            for number in range(len(self.brokers)):
                place = tp(0, broker=number, topic=self.topic)
                sender.send(place, [b"%d %d %d" % (batch, task, number)], [0])
            return TaskBranch(task, attempt, sender.prepare())

    def due(self, batches: int) -> list[bytes]:
        """Return what so many batches hold."""
        return sorted(
            b"%d %d %d" % (batch, task, number)
            for batch in range(batches)
            for task in range(TASKS)
            for number in range(len(self.brokers))
        )

    def there(self) -> list[bytes]:
        """Return what is readable."""
        return sorted(
            data for one in self.brokers for data in data_of(stored(one, self.topic))
        )

    def prepared(self) -> list[object]:
        """Return what brokers have prepared under the name of the query."""
        with Client(**self.brokers[0].client_options) as client, client.xa(NAME) as xa:
            return list(xa.recover())

    def prepared_at(self, number: int) -> list[object]:
        """Return what one broker has prepared under it; ZooKeeper is not asked."""
        address = self.brokers[number].address
        with Client(brokers=[address]) as client, client.xa(NAME) as xa:
            return list(xa.recover())

    def check(self, batches: int) -> None:
        """So many batches are there, once, and nothing is left over."""
        assert self.there() == self.due(batches)
        assert self.prepared() == []


class Run:
    """One driver on its way through a batch, as Spark has it."""

    def __init__(self, scene: Scene, batch: int) -> None:
        self._scene = scene
        self._batch = batch
        self._terms: WriteTerms | None = None
        self._branches: list[TaskBranch] = []
        self._turn: str | None = None

    def begin(self) -> None:
        self._terms = self._scene.run(lambda m: m.begin([BrokerId(0), BrokerId(1)]))

    def tasks(self) -> None:
        """Run tasks, one of them twice: the second attempt counts."""
        assert self._terms is not None
        if self._terms.covers(self._scene.query, self._batch):
            return
        self._scene.prepare(self._batch, 0)
        self._branches = [self._scene.prepare(self._batch, n) for n in range(TASKS)]

    def decide(self, patience_s: float = PATIENCE_S) -> None:
        if self._branches:
            assert self._terms is not None
            terms = self._terms
            self._turn = self._scene.run(
                lambda m: m.decide(self.decision(), terms), patience_s=patience_s
            )

    def complete(self, patience_s: float = PATIENCE_S) -> None:
        decision = self.decision() if self._branches else None
        self._scene.run(
            lambda m: m.complete(decision, self._turn), patience_s=patience_s
        )

    def abort(self, patience_s: float = PATIENCE_S) -> None:
        if self._branches:
            assert self._terms is not None
            turn = self._terms.turn
            placed = [
                (broker_id, xid)
                for xid, brokers in self.decision().xids(NAME).items()
                for broker_id in brokers
            ]
            self._scene.run(lambda m: m.give_up(placed, turn), patience_s=patience_s)

    def whole(self) -> None:
        for step in (self.begin, self.tasks, self.decide, self.complete):
            step()

    def decision(self) -> Decision:
        """Return what counts of the batch."""
        return Decision(self._scene.query, self._batch, tuple(sorted(self._branches)))


@pytest.fixture(scope="module")
def brokers(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[list[EmbeddedBroker]]:
    """Two brokers of one cluster."""
    zookeeper = MemoryZooKeeper()
    place = tmp_path_factory.mktemp("brokers")
    made = [
        EmbeddedBroker(
            place / str(number),
            topics={"unused": 1},
            zookeeper=zookeeper,
            settings={"brokerId": str(number)},
        )
        for number in (0, 1)
    ]
    with made[0], made[1]:
        yield made


@pytest.fixture
def scene(brokers: list[EmbeddedBroker]) -> Iterator[Scene]:
    found = Scene(brokers)
    try:
        yield found
    finally:
        found.close()


class Points:
    """Calls of a driver to brokers and ZooKeeper; before one, or after, it dies.

    Point 2n is before call n, point 2n + 1 after it.
    """

    def __init__(self, fatal: int) -> None:
        self._fatal = fatal
        self.passed = 0

    def wrap(self, call: Any) -> Any:
        @wraps(call)
        async def dying(*words: Any, **named: Any) -> Any:
            self._pass()
            found = await call(*words, **named)
            self._pass()
            return found

        return dying

    def _pass(self) -> None:
        self.passed += 1
        if self.passed - 1 >= self._fatal:
            raise KilledError


@contextmanager
def dying_at(fatal: int) -> Iterator[Points]:
    """Have drivers pass points inside the block."""
    points = Points(fatal)
    with (
        mock.patch.multiple(
            exactly_once,
            read_decision=points.wrap(query_progress.read_decision),
            change_decision=points.wrap(query_progress.change_decision),
        ),
        mock.patch.multiple(
            XaCommands,
            end_at=points.wrap(XaCommands.end_at),
            commit_at=points.wrap(XaCommands.commit_at),
            recover_each=points.wrap(XaCommands.recover_each),
        ),
    ):
        yield points


def is_killed(run: Run) -> bool:
    """Run a batch; return whether its driver was killed."""
    try:
        run.whole()
    except KilledError:
        return True
    except BaseExceptionGroup as group:
        if group.split(KilledError)[1] is not None:
            raise
        return True
    return False


def test_a_driver_killed_at_any_call_loses_and_doubles_nothing(scene: Scene) -> None:
    """It is run again, and killed at that call again; then it is left alone."""
    Run(scene, 0).whole()
    scene.check(1)
    for fatal in count():
        with dying_at(fatal) as points:
            kills = [is_killed(Run(scene, fatal + 1)) for _ in range(2)]
        there = scene.there()
        assert len(there) == len(set(there))
        Run(scene, fatal + 1).whole()
        scene.check(fatal + 2)
        if not any(kills):
            break
    assert points.passed > 10


@pytest.mark.parametrize("ended_by", ["its driver", "the next run", "hand"])
def test_messages_of_several_tasks_appear_together(scene: Scene, ended_by: str) -> None:
    """To readers that look all the time, whichever driver commits what was decided."""
    run = Run(scene, 0)
    run.begin()
    run.tasks()
    with ExitStack() as watching:
        looks = [
            watching.enter_context(watched(broker, scene.topic))
            for broker in scene.brokers
        ]
        run.decide()
        if ended_by == "its driver":
            run.complete()
        elif ended_by == "the next run":
            scene.run(lambda manager: manager.begin(()))
        else:
            scene.run(lambda manager: manager.settle())
        scene.check(1)
    for number, found in enumerate(looks):
        wanted = [b"0 %d %d" % (task, number) for task in range(TASKS)]
        counts = {sum(each in data for each in wanted) for data in found}
        assert counts <= {0, TASKS}


def test_a_broker_away_between_prepare_and_commit(scene: Scene) -> None:
    """The error says what stays prepared; the rerun writes nothing, and completes."""
    run = Run(scene, 0)
    run.begin()
    run.tasks()
    run.decide()
    scene.brokers[1].stop()
    try:
        with pytest.raises(
            IncompleteError, match=r"stay prepared.*checkpoint, or .*settle"
        ):
            run.complete(patience_s=3.0)
        run.abort()
    finally:
        scene.brokers[1].start()
    assert len(scene.there()) in (2, 4)
    Run(scene, 0).whole()
    scene.check(1)


def test_a_broker_that_comes_back_in_time_is_waited_for(scene: Scene) -> None:
    run = Run(scene, 0)
    run.begin()
    run.tasks()
    run.decide()
    scene.brokers[1].restart()
    run.complete()
    Run(scene, 1).begin()
    scene.check(1)


def test_zookeeper_away_leaves_a_batch_for_the_next_run(scene: Scene) -> None:
    """Nothing is rolled back while it is not known whether it is decided."""
    run = Run(scene, 0)
    run.begin()
    run.tasks()
    zookeeper = scene.brokers[0].zookeeper
    zookeeper.stop()
    try:
        with pytest.raises(CoordinationError):
            run.decide(patience_s=1.0)
        with pytest.raises(CoordinationError):
            run.abort(patience_s=1.0)
        assert len(scene.prepared_at(0)) == 3
    finally:
        zookeeper.start()
    assert scene.there() == []
    Run(scene, 0).whole()
    scene.check(1)


def test_an_aborted_batch_is_rolled_back_and_can_be_run_again(scene: Scene) -> None:
    run = Run(scene, 0)
    run.begin()
    run.tasks()
    run.abort()
    with pytest.raises(TakenOverError):
        run.decide()
    Run(scene, 0).whole()
    scene.check(1)


@pytest.mark.parametrize("is_decided", [True, False])
def test_what_a_driver_has_left_is_settled_by_hand(
    scene: Scene, is_decided: bool
) -> None:
    """As its decision says, or rolled back where there is none; it decides no more."""
    run = Run(scene, 0)
    run.begin()
    run.tasks()
    if is_decided:
        run.decide()
    settled = scene.run(lambda manager: manager.settle())
    assert settled == (run.decision() if is_decided else None)
    scene.check(int(is_decided))
    if not is_decided:
        with pytest.raises(TakenOverError):
            run.decide()
    scene.run(lambda manager: manager.settle())
    scene.check(int(is_decided))


def test_what_is_settled_before_its_tasks_prepare_is_never_decided(
    scene: Scene,
) -> None:
    """The driver lives: its rows would be there twice, once the write is repeated."""
    run = Run(scene, 0)
    run.begin()
    assert scene.run(lambda manager: manager.settle()) is None
    run.tasks()
    with pytest.raises(TakenOverError):
        run.decide()
    run.abort()
    scene.run(lambda manager: manager.settle())
    scene.check(0)


class BatchWrite:
    """A batch write with tasks in this process, and a driver that lives."""

    def __init__(self, scene: Scene, name: str = "") -> None:
        self.scene = scene
        self.name = name or f"write-{scene.query}"
        wire = {"zookeeper": "127.0.0.1:2181", "topic": scene.topic}
        self.sink = ExactSink(
            SinkOptions.from_map({**wire, "delivery": "exactly-once"}),
            name=self.name,
            place=self.name,
            write=scene.query,
            is_planned=True,
        )

    def rows(self, *steps: Callable[[], object]) -> Iterator[pa.RecordBatch]:
        """Yield a row, and another one when something has happened."""
        yield pa.RecordBatch.from_pydict({"value": [b"one"]})
        for step in steps:
            step()
        yield pa.RecordBatch.from_pydict({"value": [b"two"]})

    def is_gone(self) -> bool:
        """Return whether brokers have nothing prepared, and ZooKeeper has no node."""
        options = self.scene.brokers[0].client_options
        with Client(**options) as client, client.xa(self.name) as xa:
            prepared = list(xa.recover())
        nodes = self.scene.brokers[0].zookeeper.tree()
        return not prepared and not [path for path in nodes if self.name in path]


@pytest.fixture
def write(scene: Scene) -> Iterator[BatchWrite]:
    options = scene.brokers[0].client_options
    with own_clusters(lambda *_, **_named: AsyncClient(**options)):
        yield BatchWrite(scene)


@pytest.mark.parametrize("has_returned", [True, False])
def test_what_a_late_task_prepares_is_rolled_back(
    write: BatchWrite, has_returned: bool
) -> None:
    """By itself, or by the driver where Spark had its message after the abort."""
    if has_returned:
        write.sink.write_rows(write.rows())
        write.sink.abort(0, [])
    else:
        with pytest.raises(TakenOverError, match=r"write-.*rolled back"):
            write.sink.write_rows(write.rows(lambda: write.sink.abort(0, [])))
    assert write.is_gone()
    with pytest.raises(TakenOverError):
        write.sink.write_rows(write.rows())
    assert write.is_gone()
    assert write.scene.there() == []


def test_a_task_of_a_write_that_was_settled_rolls_back(write: BatchWrite) -> None:
    """Its driver finds nothing to decide, and removes the node."""
    settle = partial(settle_write, write.scene.target, write.name)
    with pytest.raises(TakenOverError, match=r"write-.*rolled back"):
        write.sink.write_rows(write.rows(settle))
    write.sink.abort(0, [])
    assert write.is_gone()


@pytest.mark.parametrize("has_rows", [True, False])
def test_a_batch_write_leaves_no_node(write: BatchWrite, has_rows: bool) -> None:
    """Nor does a second attempt of a task that prepares after it."""
    rows = write.rows() if has_rows else iter(())
    write.sink.commit(0, [write.sink.write_rows(rows)])
    with pytest.raises(TakenOverError):
        write.sink.write_rows(write.rows())
    assert write.is_gone()
    assert write.scene.there() == [b"one", b"two"] * has_rows


@pytest.fixture
def decided(write: BatchWrite) -> BatchWrite:
    """Return the write of a batch that is decided, and not noted by Spark."""
    scene = write.scene
    found = BatchWrite(scene, NAME)
    task = found.sink.write_rows(found.rows())
    decision = Decision(scene.query, 0, (task.branch,), task.rows)
    scene.run(lambda manager: manager.decide(decision, task.terms))
    return BatchWrite(scene, NAME)


def test_a_batch_that_was_decided_is_not_written_again(decided: BatchWrite) -> None:
    """Spark runs it once more: it has the rows that were decided."""
    task = decided.sink.write_rows(decided.rows())
    assert (task.is_repeat, task.written) == (True, Written(0, 0, 0))
    decided.sink.commit(0, [task])
    assert decided.scene.there() == [b"one", b"two"]
    assert decided.is_gone()


def test_other_rows_of_a_decided_number_are_refused(decided: BatchWrite) -> None:
    """And so is the number when a later one is decided, planned before that or not."""
    other = decided.sink.write_rows(iter([*decided.rows()][:1]))
    with pytest.raises(
        SparkError, match=r"was decided for 2 rows.*and has 1 rows.*set"
    ):
        decided.sink.commit(0, [other])
    again = decided.sink.write_rows(decided.rows())
    Run(decided.scene, 1).whole()
    with pytest.raises(SparkError, match=r"batch 0 of.*another one is decided by now"):
        decided.sink.commit(0, [again])
    late = BatchWrite(decided.scene, NAME)
    with pytest.raises(SparkError, match=r"batch 0 of.*: batch 1 is decided"):
        late.sink.write_rows(late.rows())
    assert len(decided.scene.there()) == 2 + 2 * TASKS


def test_a_broker_that_is_away_is_not_taken_for_settled(scene: Scene) -> None:
    """It may have prepared branches that are not rolled back."""
    run = Run(scene, 0)
    run.begin()
    run.tasks()
    scene.brokers[1].stop()
    try:
        with pytest.raises(
            IncompleteError, match="decided, but brokers 1 did not report"
        ):
            scene.run(lambda manager: manager.settle())
    finally:
        scene.brokers[1].start()
    settle_write(scene.target, NAME)
    scene.check(0)


def test_a_broker_whose_journal_is_offline_is_not_taken_for_settled(
    scene: Scene,
) -> None:
    """It has prepared branches that are not rolled back, and says why it cannot."""
    run = Run(scene, 0)
    run.begin()
    run.tasks()
    scene.brokers[1].stop()
    (redo,) = scene.brokers[1].data_path.rglob("redo.*")
    redo.rename(redo.with_name("kept"))
    scene.brokers[1].start()
    sentence = (
        "did not report their prepared transactions: transactions are offline until a"
    )
    try:
        with pytest.raises(IncompleteError, match=f"brokers 1 {sentence} restart"):
            settle_write(scene.target, NAME)
    finally:
        scene.brokers[1].stop()
        redo.with_name("kept").rename(redo)
        scene.brokers[1].start()
    settle_write(scene.target, NAME)
    scene.check(0)


def test_the_command_settles_what_was_decided(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the name of the write, or a key of it; the node says to people whose it is."""
    run = Run(scene, 0)
    for step in (run.begin, run.tasks, run.decide):
        step()
    for key in (f"XID:1:0a:0b:{NAME}", NAME):
        settle_write(scene.target, key)
        said = f"{NAME}: batch 0 was decided, and is committed\n"
        assert capsys.readouterr().out == said
        scene.check(1)
    node = scene.brokers[0].zookeeper.tree()[NodePaths().query_decision(NAME)]
    assert QueryRecord.decode(node.data).place == "here"
    with pytest.raises(BadParameter, match=r"expected sink-\.\.\. or write-"):
        settle_write(scene.target, "XID:1:0a:0b:billing-1")


def test_of_two_drivers_one_decides(scene: Scene) -> None:
    """The other one gets an error, and takes nothing with it."""
    first, second = Run(scene, 0), Run(scene, 0)
    first.begin()
    second.begin()
    first.tasks()
    second.tasks()
    second.decide()
    with pytest.raises(TakenOverError, match=r"another driver writes.*here"):
        first.decide()
    first.abort()
    second.complete()
    scene.check(1)


def test_a_new_query_completes_the_decision_of_the_old_one(scene: Scene) -> None:
    """A broker was away at its start; numbers of batches begin again."""
    old = Run(scene, 0)
    old.begin()
    old.tasks()
    old.decide()
    scene.query = str(uuid.uuid4())
    new = Run(scene, 0)
    scene.brokers[1].stop()
    try:
        new.begin()
    finally:
        scene.brokers[1].start()
    new.tasks()
    new.decide()
    assert scene.there() == scene.due(1)
    new.complete()
    assert scene.there() == sorted(2 * scene.due(1))


def test_a_batch_that_another_driver_has_committed_is_not_taken_for_lost(
    scene: Scene,
) -> None:
    """It began between the decision of the first one and its commit."""
    first, second = Run(scene, 0), Run(scene, 0)
    first.begin()
    first.tasks()
    first.decide()
    second.begin()
    scene.check(1)
    first.complete()
    scene.check(1)


STEPS = ("begin", "tasks", "decide", "complete")


@given(st.lists(st.tuples(st.integers(0, 1), st.booleans()), max_size=20))
@settings(max_examples=25, deadline=None)
def test_racing_drivers_lose_and_double_nothing(
    brokers: list[EmbeddedBroker], turns: list[tuple[int, bool]]
) -> None:
    """Any interleaving of the steps of two drivers, each of which may die anywhere."""
    scene = Scene(brokers)
    try:
        runs, places = [Run(scene, 0), Run(scene, 0)], [0, 0]
        for driver, dies in turns:
            is_over = dies
            if not dies:
                try:
                    getattr(runs[driver], STEPS[places[driver]])()
                except TakenOverError:
                    runs[driver].abort()
                    is_over = True
                places[driver] += 1
            if is_over or places[driver] == len(STEPS):
                runs[driver], places[driver] = Run(scene, 0), 0
        there = scene.there()
        assert len(there) == len(set(there))
        Run(scene, 0).whole()
        Run(scene, 1).begin()
        scene.check(1)
    finally:
        scene.close()


@pytest.fixture
def foreign() -> Iterator[tuple[FakeBroker, Steps]]:
    """Return a broker of MetaQ 1.4, and drivers of a query that writes to it."""
    zookeeper = MemoryZooKeeper()
    with FakeBroker({"copy": 1}, coordinator=zookeeper.coordinator) as broker:
        steps = Steps({"coordinator": zookeeper.coordinator})
        try:
            yield broker, steps
        finally:
            steps.close()


def test_metaq_1_4_keeps_a_batch_over_its_restart(
    foreign: tuple[FakeBroker, Steps],
) -> None:
    """The rerun commits it; a second one believes that nothing is left of it."""
    broker, steps = foreign
    query, branch = str(uuid.uuid4()), TaskBranch(0, 1, (BrokerId(0),))
    terms = steps.run(lambda manager: manager.begin([BrokerId(0)]))
    xid = branch_xid(NAME, query, 0, branch)
    addresses = {BrokerId(0): str(broker.address)}
    with BranchSender(addresses, xid, timeout_s=PATIENCE_S) as sender:
        sender.send(tp(0, topic="copy"), [b"1", b"2"], [0, 0])
        sender.send(tp(0, topic="copy"), [b"3"], [0])
        assert sender.prepare() == (BrokerId(0),)
    decision = Decision(query, 0, (branch,))
    turn = steps.run(lambda manager: manager.decide(decision, terms))
    broker.go_away()
    with pytest.raises(IncompleteError, match="stay prepared"):
        steps.run(lambda manager: manager.complete(decision, turn), patience_s=2.0)
    assert broker.payloads("copy") == []
    broker.come_back()
    assert steps.run(lambda manager: manager.begin([BrokerId(0)])).covers(query, 0)
    steps.run(lambda manager: manager.complete(), foreign_start_s=0.2)
    steps.run(lambda manager: manager.complete(), foreign_start_s=0.2)
    assert broker.payloads("copy") == [b"1", b"2", b"3"]


def test_a_broker_that_forgot_what_it_promised_is_an_error_once(
    foreign: tuple[FakeBroker, Steps],
) -> None:
    """Rows that are lost are never lost in silence; the rerun goes on without them."""
    _, steps = foreign
    decision = Decision(str(uuid.uuid4()), 0, (TaskBranch(0, 1, (BrokerId(0),)),))
    turn = steps.run(lambda manager: manager.decide(decision, WriteTerms("")))
    with pytest.raises(IncompleteError, match=r"rows of 1 of 1 branches.*missing"):
        steps.run(lambda manager: manager.complete(decision, turn), foreign_start_s=0.0)
    steps.run(lambda manager: manager.complete(), foreign_start_s=0.0)


def test_a_broker_that_refuses_transactions_is_named_at_the_start(
    foreign: tuple[FakeBroker, Steps],
) -> None:
    """Only if rows go to it; another one is not asked for."""
    broker, steps = foreign
    for brokers in ([], [BrokerId(0)]):
        broker.inject(FaultKind.REFUSE, verb="recover", body=b"Unsupported recover")
        if not brokers:
            steps.run(lambda manager: manager.begin([]))
            continue
        with pytest.raises(NoTransactionsError, match=r"broker 0 refuses.*Unsupported"):
            steps.run(lambda manager: manager.begin([BrokerId(0)]))


def test_an_operator_who_was_faster_is_heard(scene: Scene) -> None:
    """A commit by hand is as good; a rollback by hand is an error, and named."""
    for word, batch in (("commit", 0), ("rollback", 1)):
        run = Run(scene, batch)
        run.begin()
        run.tasks()
        run.decide()
        keys = [format_key(xid) for xid in run.decision().xids(NAME)]
        end(scene.brokers[0], keys, word)
        if word == "commit":
            run.complete()
            scene.check(1)
    with pytest.raises(IncompleteError, match=r"missing.*rolled back.*XID:"):
        run.complete()
    end(scene.brokers[0], keys, "forget")
    Run(scene, 1).whole()
    lost = {one for one in scene.due(2) if one.startswith(b"1 ") and one[-1:] == b"0"}
    assert set(scene.due(2)) - set(scene.there()) == lost
    assert scene.prepared() == []


def end(broker: EmbeddedBroker, keys: list[str], word: str) -> None:
    """End transactions as an operator does."""
    for key in keys:
        request = {"command": "end_transaction", "key": key, "as": word}
        call_admin(broker.data_path, request, timeout_s=PATIENCE_S)
