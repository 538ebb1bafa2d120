"""Which address is ours: the one that a route to others starts from."""

import socket
from collections.abc import Mapping
from typing import Self

import pytest

from metaq.net.own_host import LOOPBACK, own_host


class _Probe:
    """A datagram socket that knows its routes, and sends nothing."""

    routes: Mapping[socket.AddressFamily, str] = {}

    def __init__(self, family: socket.AddressFamily, kind: socket.SocketKind) -> None:
        assert kind is socket.SOCK_DGRAM
        self.family = family

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def connect(self, _address: tuple[str, int]) -> None:
        if self.family not in self.routes:
            raise OSError("no route")

    def getsockname(self) -> tuple[str, int]:
        return self.routes[self.family], 1


@pytest.mark.parametrize(
    ("routes", "host"),
    [
        ({socket.AF_INET: "10.0.0.7", socket.AF_INET6: "2001:db8::7"}, "10.0.0.7"),
        ({socket.AF_INET6: "2001:db8::7"}, "2001:db8::7"),
        ({socket.AF_INET: "127.0.0.2", socket.AF_INET6: "::1"}, LOOPBACK),
        ({}, LOOPBACK),
    ],
)
def test_the_host_is_that_of_a_route(
    monkeypatch: pytest.MonkeyPatch,
    routes: Mapping[socket.AddressFamily, str],
    host: str,
) -> None:
    """IPv4 first, and loopback for want of anything else."""
    probe = type("Probe", (_Probe,), {"routes": routes})
    monkeypatch.setattr("socket.socket", probe)
    assert own_host() == host
