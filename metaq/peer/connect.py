"""Connect to a broker, and read its capabilities, before the connection is used."""

import asyncio

from metaq.clock import Clock
from metaq.errors import MetaqError, NoBrokerError, RequestTimeoutError
from metaq.model import BrokerAddress, printable
from metaq.net.channel import Channel
from metaq.net.dial import dial
from metaq.peer.connection import BrokerConnection
from metaq.peer.options import ConnectionOptions
from metaq.peer.replies import require_ok
from metaq.protocol.commands import Version
from metaq.protocol.version import decode_version_body


async def open_connection(
    address: BrokerAddress,
    *,
    clock: Clock,
    deadline_s: float,
    options: ConnectionOptions,
) -> BrokerConnection:
    """Return a connection to a broker with known capabilities.

    Args:
        address: where the broker is; a name may have several addresses.
        clock: judges the deadline, and every other of the connection.
        deadline_s: absolute bound on both.
        options: bounds and times of the connection.

    Raises:
        NoBrokerError: the connection was refused, or no answer came in time; names
            address and reason. Nothing that matters was sent.

    Cancellation: the connection is closed.
    """
    loop = asyncio.get_running_loop()
    left_s = max(0.0, deadline_s - clock.monotonic_s())
    try:
        async with asyncio.timeout(left_s):
            sock = await dial(address.host, address.port, loop=loop)
    except TimeoutError as error:
        raise NoBrokerError(
            f"cannot connect to {address}: no connection within {left_s:.3g} s"
        ) from error
    except (OSError, UnicodeError) as error:
        # A name that no resolver takes is a UnicodeError.
        reason = getattr(error, "strerror", None) or error
        raise NoBrokerError(f"cannot connect to {address}: {reason}") from error
    channel = Channel(
        sock,
        loop=loop,
        clock=clock,
        room_bytes=options.in_flight_bytes_max,
    )
    connection = BrokerConnection(
        channel, address, loop=loop, clock=clock, options=options
    )
    try:
        command = Version(connection.next_opaque())
        reply = await connection.call(command, deadline_s=deadline_s)
        body = printable(require_ok(reply).text)
        connection.capabilities = decode_version_body(body)
    except RequestTimeoutError as error:
        connection.close("no version")
        reason = f"connected, but no answer within {left_s:.3g} s"
        raise NoBrokerError(f"{address}: {reason}") from error
    except MetaqError as error:
        connection.close("no version")
        raise NoBrokerError(f"{address}: {error}") from error
    except BaseException:
        connection.close("given up")
        raise
    return connection
