"""Heuristic outcomes: which prepared transactions operators have ended.

An outcome is written before it is carried out, and stays until the coordinator of the
transaction forgets it; until then every command of that coordinator is answered with
the outcome's code. Source: docs/metaq-1.4/broker.md 5.8.
"""

from metaq.clock import Clock
from metaq.errors import MetaqError
from metaq.fs import FileSystem
from metaq.txn.journal import Journal
from metaq.txn.side_files import OUTCOMES, KeptOutcome
from metaq.txn.state import HeuristicOutcome, outcome_error
from metaq.txn.transaction import OnDone


class HeuristicOutcomes:
    """Outcomes that no coordinator has forgotten. Owner: the coordinator."""

    def __init__(self, fs: FileSystem, clock: Clock, journal: Journal) -> None:
        self._fs = fs
        self._clock = clock
        self._journal = journal
        self.by_key: dict[str, KeptOutcome] = {}

    def require_none(self, key: str) -> None:
        """Raise the error of a transaction that an operator has ended."""
        kept = self.by_key.get(key)
        if kept is not None:
            raise outcome_error(key, kept.outcome)

    def keep(self, key: str, outcome: HeuristicOutcome, on_done: OnDone) -> None:
        """Write an outcome; `on_done` carries it out, or hears why it is not kept."""
        self.by_key[key] = KeptOutcome(outcome, self._clock.wall_ms())

        def written(error: MetaqError | None) -> None:
            if error is not None:
                self.by_key.pop(key, None)
            on_done(error)

        self._write(written)

    def forget(self, key: str, on_done: OnDone) -> None:
        """Forget an outcome; an unknown one is forgotten already."""
        kept = self.by_key.pop(key, None)
        if kept is None:
            on_done(None)
            return

        def written(error: MetaqError | None) -> None:
            self.by_key |= {} if error is None else {key: kept}
            on_done(error)

        self._write(written)

    def _write(self, on_done: OnDone) -> None:
        outcomes = dict(self.by_key)

        def write() -> None:
            # An outcome must not outlive the prepare that it is about.
            self._journal.sync_now()
            OUTCOMES.write(self._fs, self._journal.directory, outcomes)

        self._journal.call(write, on_done)
