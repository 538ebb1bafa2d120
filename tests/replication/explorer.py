"""Ways through the worlds of a model: all, chosen ones, random ones, and healing."""

import random
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from metaq.replication.election import Flag
from metaq.replication.record import SetRecord, foreign_reason
from metaq.replication.replica import ReplicaRole
from tests.replication.set_checks import check
from tests.replication.set_model import BUDGETED, Config, Violation, World, at
from tests.replication.set_moves import SetMoves

R = ReplicaRole


@dataclass
class Explored:
    """Result of a search."""

    states: int
    depth: int
    is_whole: bool
    """Whether every world was reached that can be."""
    history: list[str]
    """Events that led to the violation; empty if there was none."""
    violation: str = ""

    def __str__(self) -> str:
        if self.violation:
            return tell(self.history, self.violation)
        what = "all of them" if self.is_whole else "more beyond"
        return f"{self.states} states, complete to depth {self.depth}, {what}"


def tell(history: Sequence[str], violation: str) -> str:
    """Return a history that can be read, and replayed."""
    lines = [f"{n:3} {event}" for n, event in enumerate(history, 1)]
    return "\n".join([violation, *lines])


def explore(
    config: Config,
    *,
    states_max: int = 10**9,
    depth_max: int = 10**9,
) -> Explored:
    """Try everything, breadth first, up to a number of states or a depth.

    States are told apart by their hashes: two of 10^9 might be taken for one.
    """
    model = SetMoves(config)
    first = model.first()
    parents: dict[int, tuple[int, str] | None] = {hash(first): None}
    queue = deque([(first, 0)])
    depth = 0
    while queue:
        world, depth = queue.popleft()
        if depth >= depth_max:
            return Explored(len(parents), depth, False, [])
        key = hash(world)
        for label, make in model.moves(world):
            try:
                after = make()
                if after is world:
                    continue
                after_key = hash(after)
                if after_key in parents:
                    continue
                check(after)
            except Violation as error:
                history = [*_way(parents, key), label]
                return Explored(len(parents), depth + 1, False, history, str(error))
            parents[after_key] = key, label
            queue.append((after, depth + 1))
            if len(parents) >= states_max:
                return Explored(len(parents), depth, False, [])
    return Explored(len(parents), depth, True, [])


def _way(parents: dict[int, tuple[int, str] | None], key: int) -> list[str]:
    labels = []
    while (step := parents[key]) is not None:
        key, label = step
        labels.append(label)
    return labels[::-1]


def replay(config: Config, history: Sequence[str]) -> World:
    """Return the world after these events.

    Raises:
        Violation: with the history up to it.
        LookupError: an event cannot happen there.
    """
    model = SetMoves(config)
    world = model.first()
    for n, label in enumerate(history, 1):
        found = dict(model.moves(world))
        if label not in found:
            raise LookupError(tell(history[:n], f"{label}: no such event there"))
        try:
            world = found[label]()
            check(world)
        except Violation as error:
            raise Violation(tell(history[:n], str(error))) from error
    return world


def follow(config: Config, history: Sequence[str]) -> World:
    """Return the world after those of the events that can happen, each in its turn.

    Raises:
        Violation: with the history up to it.
    """
    model = SetMoves(config)
    world = model.first()
    done: list[str] = []
    for label in history:
        make = dict(model.moves(world)).get(label)
        if make is not None:
            done.append(label)
            try:
                world = make()
                check(world)
            except Violation as error:
                raise Violation(tell(done, str(error))) from error
    return world


def walk(config: Config, seed: object, *, steps: int) -> World:
    """Return the world after some steps that a seed chooses.

    Raises:
        Violation: with the history up to it.
    """
    rng = random.Random(str(seed))
    model = SetMoves(config)
    world = model.first()
    history: list[str] = []
    for _ in range(steps):
        moves = list(model.moves(world))
        if not moves:
            break
        weights = [weight(label) for label, _ in moves]
        label, make = rng.choices(moves, weights)[0]
        history.append(label)
        try:
            after = make()
            check(after)
        except Violation as error:
            text = f"seed {seed}: {error}"
            raise Violation(tell(shrunk(config, history), text)) from error
        world = after
    return world


def shrunk(config: Config, history: Sequence[str]) -> list[str]:
    """Return a history that still ends in a violation, with nothing that can go."""
    best = list(history)
    index = 0
    while index < len(best):
        shorter = best[:index] + best[index + 1 :]
        violating = _violating(config, shorter)
        if violating is None:
            index += 1
        else:
            best, index = violating, 0
    return best


def _violating(config: Config, history: list[str]) -> list[str] | None:
    """Return the events up to the violation; None where there is none, or no way."""
    model = SetMoves(config)
    world = model.first()
    for n, label in enumerate(history, 1):
        make = dict(model.moves(world)).get(label)
        if make is None:
            return None
        try:
            world = make()
            check(world)
        except Violation:
            return history[:n]
    return None


RARE = ("crash", "expire", "wipe", "roll", "tear", "ZooKeeper", "restore", "force")
SELDOM = ("take out", "give up", "hand over", "set min", "stale", "session over")


def weight(label: str) -> float:
    if label.startswith(RARE):
        return 0.15
    return 0.3 if label.startswith(SELDOM) else 1


# -- liveness -------------------------------------------------------------------------

HEALING = (
    "start", "session", "answer", "read", "merge", "lead", "claim", "join", "pull",
    "ack", "sync", "take in", "restore",
)  # fmt: skip


def is_well(world: World) -> bool:
    """Whether a leader has committed its epoch start, and all have joined it."""
    foreign = _foreign(world, world.zk.record)
    for k, proc in enumerate(world.procs, 1):
        if k in foreign:
            continue  # an operator has it discarded
        if proc is None or proc.replica.file.flag:
            return False
        if proc.replica.role not in {R.LEADING, R.FOLLOWING}:
            return False
    leaders = [p for p in world.procs if p is not None and p.replica.term is not None]
    return len(leaders) == 1 and all(
        log.hw >= log.epoch_start and log.hw == log.end for log in leaders[0].logs
    )


def _foreign(world: World, record: SetRecord) -> set[int]:
    """Return the replicas whose disks have another history than a record."""
    copies = [disk.file and disk.file.record for disk in world.disks]
    return {
        k
        for k, copy in enumerate(copies, 1)
        if copy is not None and foreign_reason(copy, record)
    }


def may_heal(world: World) -> bool:
    """Whether members of the in-sync set are left, in one history, that may lead.

    One that is sure of its directories, or so many complete ones as answer a claim.
    """
    # Of a ZooKeeper that was set back an operator restores what the copies say.
    record = SetMoves.restored(world) if world.is_back else world.zk.record
    if record is None or _foreign(world, record):
        return False  # an operator has to choose
    complete = [k for k in record.in_sync if _is_complete(world, k)]
    is_enough = len(complete) >= min(record.min, len(record.in_sync))
    return is_enough or any(_is_sure(world, k) for k in complete)


def _is_complete(world: World, k: int) -> bool:
    disk = world.disks[k - 1]
    is_proven = disk.holdings >= world.zk.members[k - 1]
    is_flagged = disk.file is None or disk.file.flag is Flag.INCOMPLETE
    return is_proven and not is_flagged and not disk.is_suspect


def _is_sure(world: World, k: int) -> bool:
    disk, proc = world.disks[k - 1], world.procs[k - 1]
    if proc is not None:
        # One that finds ZooKeeper set back freezes, and is not sure after that.
        return proc.replica.is_sure and not world.is_back
    clean = disk.file.clean if disk.file is not None else 0
    is_told = clean == disk.holdings == world.zk.members[k - 1]
    return disk.is_sealed and is_told


def heal(config: Config, world: World, *, steps: int = 200) -> World:
    """Return the world when nothing fails any more, and everybody goes on.

    Raises:
        Violation: it does not get well.
    """
    model = SetMoves(config)
    history: list[str] = []
    gone: set[int] = set()
    # No more faults; as many claims and changes of the set as it takes.
    left = tuple(steps if name in {"claims", "expansions"} else 0 for name in BUDGETED)
    world = world._replace(left=left)
    for _ in range(steps):
        if is_well(world):
            return world
        label, after = _heal_once(model, world, gone)
        if not label:
            gone |= _foreign(world, world.zk.record)
            label, after = "discard", _without(world, gone)
        if after == world:
            break
        history.append(label)
        world = after
        check(world)
    roles = [proc and str(proc.replica.role) for proc in world.procs]
    raise Violation(tell(history, f"does not get well: {roles}, {world.zk.record}"))


def _without(world: World, replicas: set[int]) -> World:
    """Return the world after an operator stopped replicas of another history.

    While ZooKeeper is set back, one replica may know a later record than the others,
    who go on without it: two histories. As long as it shows itself, they wait.
    """
    procs, present = world.procs, world.zk.present
    for k in replicas:
        procs, present = at(procs, k - 1, None), at(present, k - 1, None)
    return world._replace(procs=procs, zk=world.zk._replace(present=present))


def _heal_once(model: SetMoves, world: World, gone: set[int]) -> tuple[str, World]:
    stopped = {f"start {k}" for k in gone}
    moves = [move for move in model.moves(world) if move[0] not in stopped]
    for kind in HEALING:
        for label, make in moves:
            if re.fullmatch(rf"{kind}[ 0-9]*", label):
                after = make()
                if after != world:
                    return label, after
    return "", world
