"""Faults that wait for the commands of a fake broker."""

import enum
from dataclasses import dataclass


class FaultKind(enum.Enum):
    """Fault injected in place of a plain answer."""

    REFUSE = "not carried out; answered with a status"
    SWALLOW = "not carried out; never answered"
    SWALLOW_STORED = "carried out; never answered"
    DROP = "not carried out; the connection is cut"
    DROP_STORED = "carried out; the connection is cut before the answer"


@dataclass(slots=True)
class FakeFault:
    """A fault that waits for its commands; see `FakeBroker.inject`."""

    kind: FaultKind
    """Kind of the fault."""
    verb: str
    """To which commands; "" is every one."""
    after: int
    """So many of them pass first."""
    count: int
    """So many of them meet the fault."""
    status: int
    """Of the answer, for REFUSE."""
    body: bytes
    """Of the answer, for REFUSE."""


class Faults:
    """Those that wait. Not thread-safe; its owner serialises."""

    def __init__(self) -> None:
        """Let everything pass."""
        self.met_count = 0
        """Faults that met their command."""
        self._waiting: list[FakeFault] = []

    def add(self, fault: FakeFault) -> None:
        """Let a fault wait, behind those that wait already."""
        self._waiting.append(fault)

    def take(self, verb: str) -> FakeFault | None:
        """Return the fault that a command meets; all that wait count it."""
        taken = None
        for fault in [f for f in self._waiting if f.verb in {"", verb}]:
            if fault.after:
                fault.after -= 1
            elif taken is None:
                taken = fault
        if taken is not None:
            self.met_count += 1
            taken.count -= 1
            if not taken.count:
                self._waiting.remove(taken)
        return taken
