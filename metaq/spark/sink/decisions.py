"""Decisions about the batches of an exactly-once write, and their consequences. Pure.

Each task of a batch prepares its messages in an XA transaction of its own. A *decision*
in a ZooKeeper node determines which of these are committed: it names the batch, and for
each task the attempt to commit. The same node has a *turn*, a random text that changes
with each write to the node.

    {"turn": "5f0c93a1d2b4e687",            drawn by the last writer
     "place": "file:/checkpoint",           of the query, for people
     "query": "0f8fad5b-d9cb-...",          of the decided batch; these are missing
     "batch": 7,                            before the first decision
     "rows": 350,                           of all tasks; a decision by an older version
     "sum": "07a1f3c85b9e2d64",             has neither
     "branches": {"0,2": {"0": "89abcdef",  brokers -> task -> attempt
                          "1": "01234567"}}}

A batch is decided by a write to the node, which must still have the turn under which
the tasks were planned. Three rules keep any number of drivers consistent:

* A branch is committed only if the node names it.
* Any other branch is rolled back only if no decision can name it any more: its batch is
  decided without it, or the turn has changed, so that runs planned before it cannot
  decide.
* A decision is replaced only by that of the next batch of the same query, which Spark
  begins after the commit of the last one has returned.

A repeated batch finds its own number decided, and has the same rows as before. If it
has other rows, or a number below the decided one, the checkpoint is an older copy: the
batch is refused, because its rows were never written.

Keep in step: `exactly_once.py`, which implements this.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from struct import Struct
from typing import Final, NamedTuple

from metaq.client.names import name_few
from metaq.client.produce.branch_fates import Placed, Recovery, plan_ends
from metaq.model import BrokerId, XaTransactionId
from metaq.spark.errors import DecisionError

FORMAT_ID: Final = int.from_bytes(b"MQS1")
"""Format of the ids below: this sink, first layout."""
BATCH_WRITE: Final = "write-"
"""Names of batch writes begin so: each is one batch, and is never run again."""
ATTEMPT_MAX: Final = 2**32 - 1
"""Maximum number of an attempt: 32 bits of the branch id."""
SUM_LIMIT: Final = 2**64
DECISION_BYTES_MAX: Final = 1_000_000
"""Maximum bytes of a decision, about 50,000 branches: ZooKeeper accepts requests of
1 MiB (`jute.maxbuffer`)."""

# global id  | query (UUID, 16 bytes) | batch (int64) |
# branch     | task (uint32) | attempt (uint32) |
_GLOBAL: Final = Struct(">16sq")
_BRANCH: Final = Struct(">II")
_QUERY_BYTES: Final = 16
_NO_RECORD: Final = (ValueError, KeyError, TypeError, AttributeError)


@dataclass(frozen=True, slots=True)
class RowSum:
    """Checksum of rows that does not depend on their order or division among tasks."""

    count: int = 0
    total: int = 0
    """Sum over the rows, modulo 2^64; see `sum_rows`."""

    def __add__(self, other: "RowSum") -> "RowSum":
        total = (self.total + other.total) % SUM_LIMIT
        return RowSum(self.count + other.count, total)

    def __str__(self) -> str:
        return f"{self.count} rows with sum {self.total:016x}"


class TaskBranch(NamedTuple):
    """Transaction of one attempt of a task, with a branch at each of its brokers."""

    task: int
    attempt: int
    """Random number of the attempt, 0..ATTEMPT_MAX."""
    brokers: tuple[BrokerId, ...]
    """Brokers that have prepared it, sorted; one or more."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision to commit a batch, with its branches."""

    query: str
    """Id of the query, or of a batch write; a UUID in lower case."""
    batch: int
    branches: tuple[TaskBranch, ...] = ()
    """Branches to commit; at most one per task."""
    rows: RowSum | None = None
    """Checksum of its rows; None in a decision by an older version."""

    def covers(self, query: str, batch: int) -> bool:
        """Return whether this or an earlier decision was about the batch."""
        return query == self.query and batch <= self.batch

    def xids(self, qualifier: str) -> dict[XaTransactionId, tuple[BrokerId, ...]]:
        """Return the ids of its branches, with their brokers."""
        return {
            branch_xid(qualifier, self.query, self.batch, one): one.brokers
            for one in self.branches
        }


@dataclass(frozen=True, slots=True)
class WriteTerms:
    """The node's state when the tasks of a batch were planned; picklable."""

    turn: str
    query: str | None = None
    """The query of the last decision; None for none."""
    batch: int = -1

    def covers(self, query: str, batch: int) -> bool:
        """Return whether a batch was decided, so that nothing is to be written."""
        return query == self.query and batch <= self.batch


@dataclass(frozen=True, slots=True)
class QueryRecord:
    """The content of a query's node; the module docstring shows the fields."""

    turn: str = ""
    place: str = ""
    decision: Decision | None = None

    def encode(self) -> bytes:
        """Return the bytes of the node.

        Raises:
            DecisionError: more bytes than ZooKeeper accepts.
        """
        fields: dict[str, object] = {"turn": self.turn, "place": self.place}
        decision = self.decision
        if decision is not None:
            by_brokers: dict[str, dict[str, str]] = {}
            for one in decision.branches:
                place = by_brokers.setdefault(",".join(map(str, one.brokers)), {})
                place[str(one.task)] = f"{one.attempt:08x}"
            fields |= {
                "query": decision.query,
                "batch": decision.batch,
                "branches": by_brokers,
            }
            if decision.rows is not None:
                total = f"{decision.rows.total:016x}"
                fields |= {"rows": decision.rows.count, "sum": total}
        data = json.dumps(fields, separators=(",", ":")).encode()
        if len(data) > DECISION_BYTES_MAX:
            count = 0 if decision is None else len(decision.branches)
            raise DecisionError(
                f"the decision of a batch takes {len(data)} bytes for {count} tasks,"
                f" and ZooKeeper takes {DECISION_BYTES_MAX}: write it in fewer tasks"
                " (coalesce)"
            )
        return data

    @classmethod
    def decode(cls, data: bytes | None) -> "QueryRecord":
        """Parse the bytes of `encode`; None means a missing node.

        Raises:
            DecisionError: the bytes have another form.
        """
        if data is None:
            return cls()
        try:
            fields = json.loads(data)
            decision = _decision(fields) if "batch" in fields else None
            return cls(str(fields["turn"]), str(fields["place"]), decision)
        except _NO_RECORD as error:
            raise DecisionError(
                f"expected the decision of a write, got {data[:200]!r}"
            ) from error


def _decision(fields: Mapping[str, object]) -> Decision:
    by_brokers = fields["branches"]
    if not isinstance(by_brokers, dict):
        raise TypeError("branches")
    branches = [
        TaskBranch(int(task), int(attempt, 16), tuple(map(BrokerId, map(int, names))))
        for text, attempts in by_brokers.items()
        for names in [text.split(",")]
        for task, attempt in attempts.items()
    ]
    batch = fields["batch"]
    if not isinstance(batch, int):
        raise TypeError("batch")
    rows, count = None, fields.get("rows")
    if count is not None:
        if not isinstance(count, int):
            raise TypeError("rows")
        rows = RowSum(count, int(str(fields["sum"]), 16))
    query = _text(_bytes(str(fields["query"])))
    return Decision(query, batch, tuple(sorted(branches)), rows)


def branch_xid(
    qualifier: str, query: str, batch: int, branch: TaskBranch
) -> XaTransactionId:
    """Return the id under which brokers know a branch."""
    return XaTransactionId(
        FORMAT_ID,
        _GLOBAL.pack(_bytes(query), batch),
        _BRANCH.pack(branch.task, branch.attempt),
        qualifier,
    )


def _bytes(query: str) -> bytes:
    """Return the 16 bytes of a UUID; raises ValueError for any other text."""
    found = bytes.fromhex(query.replace("-", ""))
    if len(found) != _QUERY_BYTES:
        raise ValueError(query)
    return found


def _text(query: bytes) -> str:
    digits = query.hex()
    ends = (0, 8, 12, 16, 20, 32)
    return "-".join(digits[start:end] for start, end in pairwise(ends))


class ParsedXid(NamedTuple):
    """Parts of the id of a branch."""

    query: str
    batch: int
    task: int
    attempt: int


def parse_xid(xid: XaTransactionId) -> ParsedXid | None:
    """Return the parts of an id of `branch_xid`; None for any other one."""
    if xid.format_id != FORMAT_ID:
        return None
    if (len(xid.global_id), len(xid.branch)) != (_GLOBAL.size, _BRANCH.size):
        return None
    query, batch = _GLOBAL.unpack(xid.global_id)
    task, attempt = _BRANCH.unpack(xid.branch)
    return ParsedXid(_text(query), batch, task, attempt)


def plan_recovery(
    found: Mapping[BrokerId, Collection[XaTransactionId]],
    decision: Decision | None,
    qualifier: str,
) -> Recovery:
    """Return what becomes of the branches that brokers have prepared.

    Args:
        found: broker → ids that it lists under the qualifier.
        decision: last decision of the query; None for none.
        qualifier: of the query; ids with another qualifier or format are left out.
    """

    def is_over(xid: XaTransactionId) -> bool | None:
        parts = parse_xid(xid)
        if xid.qualifier != qualifier or parts is None:
            return None
        return decision is not None and decision.covers(parts.query, parts.batch)

    named = {} if decision is None else decision.xids(qualifier)
    return plan_ends(found, named, is_over)


def name_branches(branches: Iterable[Placed]) -> str:
    """Return the names of the first few branches, for errors."""
    names = []
    for broker_id, xid in branches:
        parts = parse_xid(xid)
        task = "?" if parts is None else parts.task
        names.append(f"task {task} at broker {broker_id}")
    return name_few(names)
