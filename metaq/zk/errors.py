"""ZooKeeper's errors in our own error tree.

Only `coordinator.py` maps kazoo's exceptions to these. All are `CoordinationError`s;
`retriable` means that the same call may succeed later with nothing changed.
"""

from typing import Final

from metaq.errors import CoordinationError, SessionSuspendedError

_READS: Final = {"get", "exists", "children", "sync", "watch"}


class CoordinationTimeoutError(CoordinationError):
    """No reply before the deadline; whether the change was made is unknown."""


def no_answer(what: str, path: str, waited_s: float) -> CoordinationTimeoutError:
    """Return the error of a request that was sent and not answered in time."""
    waited = f"no answer from ZooKeeper in {waited_s:.3g} s"
    return CoordinationTimeoutError(f"{what} {path}: {waited}{_in_doubt(what)}")


def cut_off(what: str, path: str) -> SessionSuspendedError:
    """Return the error of a request whose connection was lost before the answer."""
    lost = "the connection to ZooKeeper was lost before the answer"
    return SessionSuspendedError(f"{what} {path}: {lost}{_in_doubt(what)}")


def _in_doubt(what: str) -> str:
    # A server that hangs executes what it has received when it goes on.
    return "" if what in _READS else "; it may be carried out nevertheless"


class NoNodeError(CoordinationError):
    """The node does not exist."""

    retriable = False


class NodeExistsError(CoordinationError):
    """The node exists already."""

    retriable = False


class NodeChangedError(CoordinationError):
    """The node was written, created or deleted since it was read; read it again."""


class NodeNotEmptyError(CoordinationError):
    """The node has children and cannot be deleted."""

    retriable = False


class NodeNameError(CoordinationError):
    """ZooKeeper does not accept this text as a path or as a component of one."""

    retriable = False


class PayloadError(CoordinationError):
    """A node's payload does not have the format of its path."""

    retriable = False


class BrokerIdTakenError(CoordinationError):
    """Another broker is registered under our id, at another address."""

    retriable = False


class MemberTakenError(CoordinationError):
    """Another consumer is registered under our name, or a dead one still is.

    The node of a killed process disappears with its session, so retrying for longer
    than the session time-out distinguishes the two.
    """
