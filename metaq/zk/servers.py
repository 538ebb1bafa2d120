"""The servers of a zk.zkConnect: their addresses, and the root below which we are."""

from dataclasses import dataclass

from kazoo.hosts import collect_hosts

from metaq.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Servers:
    """An ensemble."""

    addresses: tuple[tuple[str, int], ...]
    """Host and port of each server, as they are named."""
    root: str
    """Path before all of ours; empty, or with a slash first and none at its end."""

    @property
    def hosts(self) -> list[str]:
        """Names or addresses of the servers."""
        return [host for host, _port in self.addresses]


def parse_servers(text: object) -> Servers:
    """Return the servers of a text; makes no connection.

    Args:
        text: `host:port,host:port` and optionally `/chroot`, as zk.zkConnect.

    Raises:
        TypeError: it is no text.
        ConfigError: it is not of that form.
    """
    if not isinstance(text, str):
        kind = type(text).__name__
        raise TypeError(f"zookeeper: expected str, got {kind} {text!r:.80}")
    try:
        addresses, root = collect_hosts(text)
        for host, _port in addresses:
            host.encode("idna")  # what no resolver can be asked for
    except ValueError as error:
        raise ConfigError(
            f"zk.zkConnect={text!r}: expected host:port,host:port/root, got {error}"
        ) from error
    return Servers(tuple(addresses), (root or "").rstrip("/"))
