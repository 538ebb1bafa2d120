"""Invariants of a set, and what can be looked at in one world of the model."""

from metaq.replication.election import Flag
from metaq.replication.epochs import Epoch
from metaq.replication.replica import ReplicaRole
from tests.replication.set_model import Copy, Violation, World


def check(w: World) -> None:
    """Raise where the world contradicts an invariant.

    Raises:
        Violation: with one sentence.
    """
    for k, disk in enumerate(w.disks, 1):
        if disk.file is None or disk.file.completed < w.forced:
            continue
        if not w.is_back and w.zk.record.forced[-1:] <= (w.forced,):
            _check_member(w, k)
        _check_reader(w, k)
    for i in range(len(w.committed)):
        _check_same_bytes(w, i)


def _check_member(w: World, k: int) -> None:
    """A member of the in-sync set without a flag has all that is committed."""
    disk = w.disks[k - 1]
    assert disk.file is not None
    is_trusted = not (disk.file.flag or disk.is_suspect or disk.is_old)
    if k not in w.zk.record.in_sync or not is_trusted:
        return
    for i, copy in enumerate(disk.logs):
        known = w.committed[i]
        if (
            copy.end < len(known)
            or copy.at(copy.start, len(known)) != (known[copy.start :])
        ):
            raise Violation(
                f"replica {k} is in sync, has {copy.data} from {copy.start} on in log"
                f" {i}, and {known} is committed"
            )


def _check_reader(w: World, k: int) -> None:
    """No replica serves a byte that is not committed."""
    proc = w.procs[k - 1]
    if proc is None or proc.replica.role is ReplicaRole.STARTING:
        return
    if proc.replica.file.flag is Flag.INCOMPLETE:
        return
    for i, copy in enumerate(w.disks[k - 1].logs):
        hw, known = proc.hws[i], w.committed[i]
        served = copy.at(copy.start, hw)
        if hw > len(known) or served != known[copy.start : hw]:
            raise Violation(
                f"replica {k} serves {served} from {copy.start} on of log {i}, and"
                f" {known} is committed"
            )


def _check_same_bytes(w: World, i: int) -> None:
    """The same epoch and offset name the same byte on all replicas."""
    seen: dict[tuple[object, ...], tuple[int, int]] = {}
    for k, disk in enumerate(w.disks, 1):
        copy = disk.logs[i]
        for offset, epoch in _epochs(copy):
            byte = copy.data[offset - copy.start]
            key = copy.number, epoch, offset
            other, found = seen.setdefault(key, (k, byte))
            if found != byte:
                raise Violation(
                    f"log {i}: offset {offset} of epoch {epoch} is {found} on replica"
                    f" {other}, {byte} on replica {k}"
                )


def _epochs(copy: Copy) -> list[tuple[int, Epoch]]:
    found: list[tuple[int, Epoch]] = []
    for n, entry in enumerate(copy.table):
        more = copy.table[n + 1 :]
        stop = min([copy.end, *(e.start for e in more)])
        found += [(o, entry.epoch) for o in range(max(entry.start, copy.start), stop)]
    return found
