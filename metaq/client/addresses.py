"""Addresses of brokers, as people write them."""

from metaq.errors import ConfigError
from metaq.zk.errors import PayloadError
from metaq.zk.znodes import BrokerAddress, decode_address


def parse_address(text: str) -> BrokerAddress:
    """Return the address that `host:port` or `meta://host:port` says.

    Raises:
        ConfigError: it is neither.
    """
    bare = text.removeprefix("meta://")
    try:
        # Bytes of a command line that are no UTF-8 are refused as such.
        return decode_address(f"meta://{bare}".encode(errors="surrogatepass"))
    except PayloadError as error:
        raise ConfigError(f"broker: expected host:port, got {text!r}") from error
