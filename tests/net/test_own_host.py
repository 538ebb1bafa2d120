"""The address of this machine, of a route or of an interface."""

from ipaddress import ip_address

import pytest

from metaq.net.own_host import LOOPBACK, own_host


@pytest.mark.parametrize(
    ("routed", "interfaces", "host"),
    [
        (["10.0.0.7", "2001:db8::7"], [], "10.0.0.7"),
        (["192.0.2.7"], ["10.0.0.7"], "192.0.2.7"),
        ([], ["127.0.0.1", "::1", "2001:db8::7", "10.0.0.7", "10.0.0.8"], "10.0.0.7"),
        (["2001:db8::7"], ["127.0.0.1", "10.0.0.7"], "10.0.0.7"),
        (["2001:db8::7"], ["fe80::1", "2001:db8::8"], "2001:db8::7"),
        ([], ["fe80::1", "2001:db8::8"], "2001:db8::8"),
        (["127.0.0.2", "::1"], ["127.0.0.1", "::1", "fe80::1", "0.0.0.0"], LOOPBACK),
        ([], [], LOOPBACK),
    ],
)
def test_the_host_is_the_first_that_others_reach(
    routed: list[str], interfaces: list[str], host: str
) -> None:
    """IPv4 first, that of a route first, and loopback for want of anything else."""
    assert own_host(lambda: routed, lambda: interfaces) == host


def test_a_machine_has_the_host_that_it_finds() -> None:
    """Whatever interfaces it has, the answer is an address."""
    assert ip_address(own_host())
    assert ip_address(own_host(routed=list))
