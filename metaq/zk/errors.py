"""ZooKeeper's refusals as errors of our own tree.

kazoo's exceptions are mapped to these in `coordinator.py` and nowhere else. All are
`CoordinationError`s; `retriable` says whether the same call can succeed later with
nothing changed.
"""

from metaq.errors import CoordinationError


class CoordinationTimeoutError(CoordinationError):
    """No answer before the deadline; whether the change happened is unknown."""


class NoNodeError(CoordinationError):
    """The node does not exist."""

    retriable = False


class NodeExistsError(CoordinationError):
    """The node exists already."""

    retriable = False


class NodeChangedError(CoordinationError):
    """The node was written, created or deleted since it was read: read it again."""


class NodeNotEmptyError(CoordinationError):
    """The node has children and cannot be deleted."""

    retriable = False


class NodeNameError(CoordinationError):
    """ZooKeeper does not accept this text as a path, or as one step of it."""

    retriable = False


class PayloadError(CoordinationError):
    """A node's payload is not of the form that its path promises."""

    retriable = False


class BrokerIdTakenError(CoordinationError):
    """Another broker is registered under our id, at another address."""

    retriable = False


class MemberTakenError(CoordinationError):
    """Another consumer is registered under our name, or a dead one still is.

    The node of a killed process disappears with its session, so trying again for longer
    than the session time-out distinguishes the two.
    """
