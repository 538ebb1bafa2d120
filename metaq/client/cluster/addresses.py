"""Addresses of brokers, as people write them."""

from collections.abc import Sequence

from metaq.errors import ConfigError
from metaq.model import SCHEME, BrokerAddress, parse_broker_address


def parse_address(text: str) -> BrokerAddress:
    """Return the address that `host:port` or `meta://host:port` says.

    Raises:
        ConfigError: it is neither.
    """
    # Bytes of a command line that are no UTF-8 do not print, and are refused.
    address = parse_broker_address(SCHEME + text.removeprefix(SCHEME))
    if address is None:
        raise ConfigError(f"broker: expected host:port, got {text!r}")
    return address


def parse_addresses(texts: Sequence[str]) -> list[BrokerAddress]:
    """Return the addresses that some texts say.

    Raises:
        ConfigError: one of them is none; there is none; or all is one text, whose
            letters are no addresses.
    """
    if isinstance(texts, str) or not texts:
        raise ConfigError(
            f"brokers: expected a list of host:port, one at least, got {texts!r}"
        )
    return [parse_address(text) for text in texts]
