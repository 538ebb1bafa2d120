"""Random lives of transactions against a model in a dictionary."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from metaq.errors import MetaqError, TransactionError
from metaq.model import LogId
from metaq.txn.state import HeuristicOutcome
from tests.rigs.fs import FaultyFileSystem, keep_all, keep_none, keep_random
from tests.sampling import examples
from tests.txn.support import A, B, TransactionBench, each_once, opened

TIMEOUT_S = 10


@dataclass
class Modelled:
    """A transaction as the model has it."""

    owner: str | None
    """Connection that it ends with; None: XA."""
    putter: str | None
    """Connection that may put; None: it is gone."""
    deadline_s: float | None
    puts: list[tuple[LogId, bytes]] = field(default_factory=list)
    is_prepared: bool = False


class Transactions(RuleBasedStateMachine):
    """Two connections, XA keys of both, time-outs, heuristics, stops and crashes."""

    keys = Bundle("keys")

    @initialize()
    def start(self) -> None:
        self.bench = TransactionBench(FaultyFileSystem(), file_bytes_max=600)
        self.bench.open()
        self.open: dict[str, Modelled] = {}
        self.outcomes: dict[str, HeuristicOutcome] = {}
        self.visible: dict[LogId, list[bytes]] = {A: [], B: []}
        self.number = 0

    # -- what clients do

    @rule(
        target=keys,
        is_xa=st.booleans(),
        owner=st.sampled_from("pq"),
        timed=st.booleans(),
    )
    def begin(self, is_xa: bool, owner: str, timed: bool) -> str:
        self.number += 1
        key = f"XID:1:{self.number:04x}::uq" if is_xa else f"TX:{owner}:{self.number}"
        self.bench.begin(key, owner, TIMEOUT_S if timed else 0)
        now_s = self.bench.clock.monotonic_s()
        self.open[key] = Modelled(
            None if is_xa else owner, owner, now_s + TIMEOUT_S if timed else None
        )
        return key

    @rule(key=keys, owner=st.sampled_from("pq"))
    def begin_again(self, key: str, owner: str) -> None:
        if key not in self.open:
            return
        if self.open[key].putter == owner and self.takes_puts(key):
            self.bench.begin(key, owner)
        else:
            with pytest.raises(TransactionError, match="is in use"):
                self.bench.begin(key, owner)

    @rule(key=keys, log_id=st.sampled_from([A, B]), size=st.integers(0, 200))
    def put(self, key: str, log_id: LogId, size: int) -> None:
        self.number += 1
        payload = b"%d:" % self.number + b"x" * size
        owner = self.open[key].putter if key in self.open else self.owner_of(key)
        if self.takes_puts(key):
            ticket = self.bench.put(key, log_id, payload, owner)
            self.bench.run()
            assert ticket.is_written
            self.open[key].puts.append((log_id, payload))
        else:
            with pytest.raises(TransactionError):
                self.bench.put(key, log_id, payload, owner)

    @rule(key=keys)
    def put_on_another_connection(self, key: str) -> None:
        if key in self.open:
            is_local = self.open[key].owner is not None
            text = "not been started" if is_local else "is open elsewhere|takes no puts"
            with pytest.raises(TransactionError, match=text):
                self.bench.put(key, A, b"foreign", "somebody else")

    @rule(key=keys)
    def prepare(self, key: str) -> None:
        modelled = self.open.get(key)
        if modelled is None or modelled.owner is not None or modelled.is_prepared:
            with pytest.raises(TransactionError):
                self.bench.prepare(key)
            return
        answer = self.bench.prepare(key)
        self.bench.run()
        assert answer.is_good
        assert answer.vote == (0 if modelled.puts else 3)
        modelled.is_prepared = bool(modelled.puts)
        modelled.deadline_s = None
        if not modelled.puts:
            del self.open[key]

    @rule(key=keys, is_two_phase=st.booleans())
    def commit(self, key: str, is_two_phase: bool) -> None:
        modelled = self.open.get(key)
        is_unprepared_xa = (
            modelled is not None and modelled.owner is None and not modelled.is_prepared
        )
        if modelled is None or (is_two_phase and is_unprepared_xa):
            with pytest.raises(TransactionError):
                self.bench.commit(key, self.owner_of(key), is_two_phase=is_two_phase)
            return
        answer = self.bench.commit(key, modelled.owner, is_two_phase=is_two_phase)
        self.bench.run()
        assert answer.is_good
        self.apply(key)

    @rule(chosen=st.lists(keys, min_size=1, max_size=4))
    def commit_together(self, chosen: list[str]) -> None:
        """Prepared ones of them are committed, the others are left as they are."""
        prepared = [
            key
            for key in dict.fromkeys(chosen)
            if key in self.open and self.open[key].is_prepared
        ]
        answers: list[MetaqError | None] = []
        self.bench.coordinator.commit_together(chosen, answers.extend)
        self.bench.run()
        assert [error is None for error in answers] == [k in prepared for k in chosen]
        for key in prepared:
            self.apply(key)

    @rule(key=keys)
    def rollback(self, key: str) -> None:
        if key not in self.open:
            with pytest.raises(TransactionError):
                self.bench.rollback(key, self.owner_of(key))
            return
        answer = self.bench.rollback(key, self.open[key].owner)
        self.bench.run()
        assert answer.is_good
        del self.open[key]

    @rule(first=keys, second=keys)
    def race(self, first: str, second: str) -> None:
        """Two coordinators decide one transaction both ways, in the same moment."""
        modelled = self.open.get(first)
        if modelled is None or not modelled.is_prepared or first != second:
            return
        good = self.bench.commit(first, is_two_phase=True)
        with pytest.raises(TransactionError):
            self.bench.rollback(first)
        again = self.bench.commit(first, is_two_phase=True)
        self.bench.run()
        assert good.is_good
        assert again.is_good
        self.apply(first)

    @rule(owner=st.sampled_from("pq"))
    def disconnect(self, owner: str) -> None:
        self.bench.coordinator.end_owner(owner)
        self.bench.run()
        self.open = {k: m for k, m in self.open.items() if m.owner != owner}
        for modelled in self.open.values():
            if modelled.putter == owner:
                modelled.putter = None

    @rule(seconds=st.sampled_from([1, 4, 11]), is_lazy=st.booleans())
    def wait(self, seconds: int, is_lazy: bool) -> None:
        self.bench.clock.advance_s(seconds)
        now_s = self.bench.clock.monotonic_s()
        late = {
            key
            for key, modelled in self.open.items()
            if modelled.deadline_s is not None and modelled.deadline_s <= now_s
        }
        if not is_lazy:
            self.bench.coordinator.tick()
            self.bench.run()
        self.open = {k: m for k, m in self.open.items() if k not in late}

    # -- what operators do

    @rule(key=keys, outcome=st.sampled_from(HeuristicOutcome))
    def decide(self, key: str, outcome: HeuristicOutcome) -> None:
        modelled = self.open.get(key)
        is_open = modelled is not None and not modelled.is_prepared
        if is_open and outcome is HeuristicOutcome.ROLLBACK:
            answer = self.bench.decide(key, outcome)
            self.bench.run()
            assert answer.is_good
            del self.open[key]
            return
        if modelled is None or not modelled.is_prepared:
            with pytest.raises(TransactionError):
                self.bench.decide(key, outcome)
            return
        answer = self.bench.decide(key, outcome)
        self.bench.run()
        assert answer.is_good
        if outcome is HeuristicOutcome.COMMIT:
            self.apply(key)
        else:
            del self.open[key]
        self.outcomes[key] = outcome

    @rule(key=keys)
    def forget(self, key: str) -> None:
        if key.startswith("TX:"):
            with pytest.raises(TransactionError, match="is not a valid xid"):
                self.bench.forget(key)
            return
        answer = self.bench.forget(key)
        self.bench.run()
        assert answer.is_good
        self.outcomes.pop(key, None)

    @rule()
    def checkpoint(self) -> None:
        self.bench.coordinator.checkpoint()
        self.bench.run()

    # -- what happens to the machine

    @rule()
    def stop_and_start(self) -> None:
        self.bench.close()
        self.reopen(self.bench.fs)

    @rule(seed=st.integers(0, 9))
    def crash(self, seed: int) -> None:
        choose = (keep_all, keep_none, keep_random(seed))[seed % 3]
        self.reopen(self.bench.fs.crash(choose))

    def reopen(self, fs: FaultyFileSystem) -> None:
        self.bench = TransactionBench(fs, clock=self.bench.clock, file_bytes_max=600)
        self.bench.open()
        self.open = {k: m for k, m in self.open.items() if m.is_prepared}
        for modelled in self.open.values():
            modelled.putter = None

    # -- the model

    def owner_of(self, key: str) -> str | None:
        return None if key.startswith("XID") else key.split(":")[1]

    def takes_puts(self, key: str) -> bool:
        found = self.open.get(key)
        return found is not None and not found.is_prepared and found.putter is not None

    def apply(self, key: str) -> None:
        for log_id, payload in self.open.pop(key).puts:
            self.visible[log_id].append(payload)

    @invariant()
    def what_is_readable_is_what_is_committed(self) -> None:
        if hasattr(self, "bench"):
            for log_id, wanted in self.visible.items():
                assert self.bench.payloads(log_id) == wanted
            each_once(self.bench.payloads())

    @invariant()
    def what_is_listed_is_what_is_in_doubt(self) -> None:
        if hasattr(self, "bench"):
            prepared = {key for key, m in self.open.items() if m.is_prepared}
            listed = set(self.bench.coordinator.recover(None))
            assert listed == prepared | self.outcomes.keys()
            figures = self.bench.coordinator.figures()
            assert figures.offline_cause is None
            assert figures.in_doubt_count == len(prepared)


Transactions.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=40
)
test_transactions_are_what_the_model_says = pytest.mark.slow(Transactions.TestCase)


@pytest.mark.parametrize("outcome", HeuristicOutcome)
def test_what_has_run_out_of_time_is_not_decided(outcome: HeuristicOutcome) -> None:
    """Also where nothing has looked at its time since."""
    bench = opened(FaultyFileSystem())
    bench.begin("TX:p:1", "p", TIMEOUT_S)
    bench.put("TX:p:1", A, b"late", "p")
    bench.clock.advance_s(TIMEOUT_S)
    with pytest.raises(TransactionError, match="has not been started"):
        bench.decide("TX:p:1", outcome)
    bench.run()
    assert bench.coordinator.views() == []
    assert bench.payloads() == []
