"""The servers in zk.zkConnect: their addresses, and the root of all our paths."""

from dataclasses import dataclass

from kazoo.hosts import collect_hosts

from metaq.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Servers:
    """A ZooKeeper ensemble."""

    addresses: tuple[tuple[str, int], ...]
    """Host and port of each server, as given."""
    root: str
    """Prefix of all our paths; empty, or with a leading slash and no trailing one."""

    @property
    def hosts(self) -> list[str]:
        """Names or addresses of the servers."""
        return [host for host, _port in self.addresses]


def parse_servers(text: object) -> Servers:
    """Parse a list of servers; connects to none.

    Args:
        text: `host:port,host:port` and optionally `/chroot`, as zk.zkConnect.

    Raises:
        TypeError: it is not a str.
        ConfigError: it is not of that form.
    """
    if not isinstance(text, str):
        kind = type(text).__name__
        raise TypeError(f"zookeeper: expected str, got {kind} {text!r:.80}")
    if "://" in text:
        raise ConfigError(
            f"zk.zkConnect={text!r}: expected host:port,host:port/root, got a URL"
        )
    try:
        addresses, root = collect_hosts(text)
        for host, _port in addresses:
            host.encode("idna")  # what no resolver can be asked for
    except ValueError as error:
        raise ConfigError(
            f"zk.zkConnect={text!r}: expected host:port,host:port/root, got {error}"
        ) from error
    return Servers(tuple(addresses), (root or "").rstrip("/"))
