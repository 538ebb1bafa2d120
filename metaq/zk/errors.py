"""ZooKeeper's errors in our own error tree.

Only `coordinator.py` maps kazoo's exceptions to these. All are `CoordinationError`s;
`retriable` means that the same call may succeed later with nothing changed.
"""

from metaq.errors import CoordinationError


class CoordinationTimeoutError(CoordinationError):
    """No reply before the deadline; whether the change was made is unknown."""


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
