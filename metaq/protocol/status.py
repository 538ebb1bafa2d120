"""Numeric reply codes. Names may change; the numbers are on the wire for ever."""

import enum


class Status(enum.IntEnum):
    """The codes of MetaQ 1.4 (broker spec 1.12)."""

    OK = 200
    """Done; the body depends on the command."""
    MOVED = 301
    """Read on at the decimal offset in the body."""
    BAD_REQUEST = 400
    """A get with a maximum size of 0 or less."""
    UNAUTHORIZED = 401
    """Defined by MetaQ, never sent."""
    FORBIDDEN = 403
    """The partition is administratively closed."""
    NOT_FOUND = 404
    """No such partition on this broker, or no data at that offset."""
    SERVER_ERROR = 500
    """Everything else; the body tells the reason."""
    UNAVAILABLE = 503
    """The command has no handler, or the broker is shutting down."""
    GATEWAY_TIMEOUT = 504
    """Never on the wire: clients make it for their own time-outs."""
