"""Model of one group: messages that may be handed out, and offsets that may be stored.

It is notified of four things: changes of owners and offsets in ZooKeeper, calls of
members to their consumers, messages handed out, and messages appended. Messages are
numbered in each partition, and all have the same size, so an offset is also a number.

    reading begins   at the committed offset, or at the log start without one
    hand-outs        in order, without a gap; from elsewhere after seek and rollback
    a commit         writes what is handled, or the offset given by the user, as owner
    handled          when more is requested, by `commit`, by a clean end

Nothing is skipped: a commit only passes messages that are handled, or that the user
skipped by a commit or a seek of an offset.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from metaq.model import Message, Offset, TopicPartition
from tests.client.group_members import CLOCK

PAYLOAD_BYTES: Final = 8
STEP: Final = 20 + PAYLOAD_BYTES
"""Bytes of a message in the log."""
REQUEST_S: Final = 2.0
"""Of all clients: bound on a request."""
LATE_S: Final = 2 * REQUEST_S + 1
"""A commit is written or given up so long after it began."""
NOTES_MAX: Final = 60


@dataclass(eq=False)
class Process:
    """A client: what it has handled is not handed out to it again, if it may skip."""

    name: str
    handled: defaultdict[TopicPartition, set[int]] = field(
        default_factory=lambda: defaultdict(set)
    )
    passed: defaultdict[TopicPartition, set[int]] = field(
        default_factory=lambda: defaultdict(set)
    )
    """Sought over."""

    def is_over(self, one: TopicPartition, number: int) -> bool:
        """Whether it may be left out: a mark of repeats is one offset, no range."""
        return number < self.end(one)

    def end(self, one: TopicPartition) -> int:
        return max(self.handled[one] | self.passed[one], default=-1) + 1


@dataclass(eq=False)
class Reader:
    """One consumer, as the model knows it."""

    name: str
    process: Process
    is_manual: bool
    skips_repeats: bool
    has_hooks: bool
    is_sloppy: bool = False
    """Whether its last commits may be left out."""
    is_dead: bool = False
    paused: set[TopicPartition] = field(default_factory=set)
    ready: set[TopicPartition] = field(default_factory=set)
    """Those whose `on_assigned` has returned."""
    out: dict[TopicPartition, int] = field(default_factory=dict)
    """Handed out and not handled: the number after the last one."""
    commits: int = 0
    """Calls that may write."""
    commit_calls: int = 0
    """All there ever were."""
    commits_until_s: float = 0.0
    """Until then a call whose time was over may write."""

    @property
    def may_write(self) -> bool:
        is_late = CLOCK.monotonic_s() <= self.commits_until_s
        return not self.is_manual or self.commits > 0 or is_late


@dataclass(eq=False)
class Claim:
    """The time for which one consumer owns a partition."""

    reader: Reader
    session_id: int
    next: int = 0
    """Number of the message that comes next."""
    handled: int = 0
    """Number of the first message that may not be committed."""
    sure: int = 0
    """The same, as far as it is certain that it is handled."""
    skip_max: int = 0
    """The process may leave out what it handled before this claim, before here."""
    begin_count: int = 0
    """Number of times that reading began, here or elsewhere."""
    has_moved: bool = False
    """Whether a seek or a rollback has asked for repeats."""
    named: set[int] = field(default_factory=set)
    """Offsets that the user named: a commit may write them."""
    backs: Counter[int] = field(default_factory=Counter)
    """Those that may be before the committed one, once for each call."""
    peak: int = 0
    peak_until_s: float = 0.0
    """Handled before a seek or rollback, and perhaps on its way to the store."""
    moves: list[int] = field(default_factory=list)
    """Places of seeks and rollbacks to which the offset did not go back."""
    is_steady: bool = True
    """Whether the user never set an offset back, and nothing failed."""
    written: list[int] = field(default_factory=list)
    ended_s: float | None = None


class Violation(AssertionError):
    """The model forbids what happened."""


class Model:
    """One group, and all that its members did. Owner: the walk."""

    def __init__(self) -> None:
        self.ends: dict[TopicPartition, int] = {}
        """Number of messages of each partition."""
        self.stored: dict[TopicPartition, int | None] = {}
        self.writes: dict[TopicPartition, list[int]] = {}
        """All offsets that were written."""
        self.claims: dict[TopicPartition, Claim] = {}
        """The present owners."""
        self.last: dict[tuple[Reader, TopicPartition], Claim] = {}
        """The last claim of each reader, ended or not."""
        self.covered: dict[TopicPartition, set[int]] = {}
        """Messages that a member handled, or that the user passed."""
        self.violation: Violation | None = None
        self.notes: deque[str] = deque(maxlen=NOTES_MAX)
        self.handed_count = 0
        self.write_count = 0

    def note(self, text: str) -> None:
        self.notes.append(f"{CLOCK.monotonic_s():10.3f} {text}")

    def fail(self, text: str) -> None:
        """Keep the first violation; most callers are inside the product."""
        if self.violation is None:
            self.note(f"VIOLATION {text}")
            self.violation = Violation("\n".join([text, *self.notes]))

    def add_partition(self, one: TopicPartition) -> None:
        self.ends[one], self.stored[one] = 0, None
        self.writes[one], self.covered[one] = [], set()

    # -- ZooKeeper --------------------------------------------------------------------

    def on_claimed(self, one: TopicPartition, reader: Reader, session_id: int) -> None:
        self.note(f"{reader.name} owns {one}")
        claim = Claim(reader, session_id)
        self.claims[one] = self.last[reader, one] = claim
        self._forget(reader, one)

    def _forget(self, reader: Reader, one: TopicPartition) -> None:
        reader.out.pop(one, None)
        reader.paused.discard(one)
        reader.ready.discard(one)

    def on_begun(self, one: TopicPartition, reader: Reader, number: int) -> None:
        """Reading begins; once more if the partition was revoked and not released."""
        self.note(f"{reader.name} begins at {number} of {one}")
        stored = self.stored[one] or 0
        if number != stored:
            self.fail(f"{one}: {reader.name} begins at {number}, not {stored}")
        claim = self.claim_of(reader, one)
        if claim is None:
            return
        # Also what another consumer of the process has handled.
        claim.skip_max = reader.process.end(one) if reader.skips_repeats else 0
        claim.next = claim.handled = claim.sure = number
        claim.has_moved = False
        claim.begin_count += 1
        self._forget(reader, one)

    def on_released(self, one: TopicPartition, *, is_release: bool) -> None:
        claim = self.claims.pop(one)
        claim.ended_s = CLOCK.monotonic_s()
        reader = claim.reader
        reader.paused.discard(one)
        stored = self.stored[one] or 0
        self.note(f"{reader.name} gives up {one} at {stored} of {claim.sure}")
        may_miss = reader.is_manual or reader.is_sloppy or not claim.is_steady
        if is_release and not may_miss and stored < claim.sure:
            self.fail(f"{one}: released at {stored}, handled is {claim.sure}")

    def on_write(self, one: TopicPartition, offset: int, session_id: int) -> None:
        number, rest = divmod(offset, STEP)
        before, self.stored[one] = self.stored[one] or 0, number
        self.write_count += 1
        self.writes[one].append(number)
        claim = self.claims.get(one)
        if claim is None or claim.session_id != session_id:
            self.fail(f"{one}: {number} written by session {session_id}, no owner")
            return
        reader = claim.reader
        self.note(f"{reader.name} commits {number} of {one}, after {before}")
        claim.written.append(number)
        what = f"{one}: {reader.name} committed {number} after {before}"
        if rest or number > self.ends[one]:
            self.fail(f"{one}: {offset} is no boundary")
        if not reader.may_write:
            self.fail(f"{what}, and nobody called commit")
        if number not in claim.named and number > self._limit(one, claim):
            self.fail(f"{what}, and handled is {claim.handled}")
        if number < before:
            if moves := [at for at in claim.moves if at <= number]:
                claim.moves.remove(max(moves))
            elif backs := [at for at, n in claim.backs.items() if n and at <= number]:
                # One that was named after it may have taken its place.
                claim.backs[max(backs)] -= 1
            else:
                self.fail(f"{what}, and nobody went back")
        if number in claim.named:
            self._cover(one, range(before, number))

    def _limit(self, one: TopicPartition, claim: Claim) -> int:
        """Return how far a commit may go: what is left out as a repeat is handled."""
        number, process = claim.handled, claim.reader.process
        if CLOCK.monotonic_s() <= claim.peak_until_s:
            number = max(number, claim.peak)
        while not claim.has_moved and number < claim.skip_max:
            if not process.is_over(one, number):
                break
            number += 1
        return number

    def _cover(self, one: TopicPartition, numbers: Iterable[int]) -> None:
        self.covered[one].update(numbers)

    # -- what a reader does -----------------------------------------------------------

    def claim_of(self, reader: Reader, one: TopicPartition) -> Claim | None:
        claim = self.claims.get(one)
        return claim if claim is not None and claim.reader is reader else None

    def request(
        self,
        reader: Reader,
        open_ones: Iterable[TopicPartition],
        *,
        is_sure: bool = True,
    ) -> None:
        """More is requested, or all is committed: what was handed out is handled."""
        alive = set(open_ones)
        for one, end in reader.out.items():
            claim = self.last[reader, one]
            if claim is not self.claims.get(one) and one not in alive:
                continue
            numbers = range(claim.handled, end)
            claim.handled = end
            if one in alive and is_sure:
                claim.sure = end
            self._cover(one, numbers)
            reader.process.handled[one].update(numbers)
        reader.out.clear()

    def hand_out(self, reader: Reader, messages: Iterable[Message]) -> None:
        for message in messages:
            self._hand_out(reader, message)

    def _hand_out(self, reader: Reader, message: Message) -> None:
        one, number = message.partition, int(message.data)
        self.handed_count += 1
        what = f"{one}: {number} handed out to {reader.name}"
        self.note(what)
        if message.offset != number * STEP:
            self.fail(f"{what}, at offset {message.offset}")
        if one in reader.paused:
            self.fail(f"{what}, which has paused it")
        if reader.has_hooks and one not in reader.ready:
            self.fail(f"{what} before on_assigned returned")
        claim = self.last.get((reader, one))
        if claim is None:
            self.fail(f"{what}, which never owned it")
            return
        if claim.ended_s is not None and CLOCK.monotonic_s() > claim.ended_s:
            self.fail(f"{what}, which has lost it")
        while number > claim.next and self._may_skip(one, claim):
            claim.next += 1
        if number != claim.next:
            self.fail(f"{what}, next is {claim.next}")
        if claim.next > claim.handled and one not in reader.out:
            # Left out as repeats.
            claim.handled = claim.next
        claim.next = number + 1
        reader.out[one] = number + 1

    def _may_skip(self, one: TopicPartition, claim: Claim) -> bool:
        if claim.has_moved or claim.next >= claim.skip_max:
            return False
        return claim.reader.process.is_over(one, claim.next)

    def moved(
        self, reader: Reader, one: TopicPartition, number: int, *, is_seek: bool
    ) -> None:
        """Reading goes on elsewhere."""
        claim = self.claim_of(reader, one)
        if claim is None:
            return
        self.note(f"{reader.name} moves to {number} of {one}")
        if is_seek:
            passed = range(min(claim.handled, self.stored[one] or 0), number)
            self._cover(one, passed)
            reader.process.passed[one].update(passed)
        reader.out.pop(one, None)
        claim.peak = max(claim.peak, claim.handled)
        claim.peak_until_s = CLOCK.monotonic_s() + LATE_S
        claim.next = claim.handled = claim.sure = number
        claim.has_moved = True
        claim.moves.append(number)
        claim.begin_count += 1

    def names(
        self,
        reader: Reader,
        offsets: dict[TopicPartition, Offset],
        *,
        may_go_back: bool,
    ) -> None:
        """The user names offsets in a commit."""
        for one, offset in offsets.items():
            claim = self.claim_of(reader, one)
            if claim is not None:
                number = offset // STEP
                claim.named.add(number)
                claim.backs[number] += may_go_back
                claim.is_steady &= not may_go_back

    def disturb(self) -> None:
        """Commits may fail from now on: handled messages come again."""
        for claim in self.claims.values():
            claim.is_steady = False

    # -- the end ----------------------------------------------------------------------

    def check(self) -> None:
        if self.violation is not None:
            raise self.violation

    def check_complete(self) -> None:
        """Every message was handled, or the user passed it."""
        for one, end in self.ends.items():
            missing = sorted(set(range(end)) - self.covered[one])
            if missing:
                self.fail(f"{one}: never handled: {missing}")
            if self.stored[one] != end and end:
                self.fail(f"{one}: {self.stored[one]} is committed at last, not {end}")
