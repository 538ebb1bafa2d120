"""Advertised and listening addresses, and hosts that have no address."""

import socket
from pathlib import Path

import pytest

from metaq.broker.registration import (
    advertised_host,
    find_unknown_hosts,
    listening_host,
)
from tests.rigs.broker import CONFIG, make_config

NO_HOST = CONFIG.replace("hostName=127.0.0.1\n", "")
UNKNOWN = NO_HOST.replace("[system]", "[system]\nhostName=brokre..example").replace(
    "zk.zkEnable=false", "zk.zkConnect=localhost:2181,zoo.example:2181/meta"
)


def test_each_unknown_host_is_named_with_its_setting(tmp_path: Path) -> None:
    """One sentence each, with the resolver's reason."""

    def resolve(host: str, _: None) -> None:
        if host != "localhost":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    assert find_unknown_hosts(make_config(tmp_path, text=UNKNOWN), resolve) == [
        f"{setting} names the host '{host}', which this machine cannot resolve:"
        " Name or service not known"
        for setting, host in (
            ("[system] hostName", "brokre..example"),
            ("[zookeeper] zk.zkConnect", "zoo.example"),
        )
    ]
    assert find_unknown_hosts(make_config(tmp_path)) == []


def test_a_host_is_found_when_none_is_configured(tmp_path: Path) -> None:
    """hostName wins; else an address that is not empty."""
    assert advertised_host(make_config(tmp_path)) == "127.0.0.1"
    assert advertised_host(make_config(tmp_path, text=NO_HOST))


@pytest.mark.parametrize(
    ("host", "wanted"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("::1", "::1"),
        ("localhost", "127.0.0.1"),
        ("192.0.2.7", ""),
        ("broker.example.org", ""),
        ("", ""),
    ],
)
def test_who_is_told_loopback_is_listened_to_on_loopback(
    tmp_path: Path, host: str, wanted: str
) -> None:
    """A broker for this machine lets no other machine in."""
    text = CONFIG.replace("hostName=127.0.0.1\n", f"hostName={host}\n" if host else "")
    assert listening_host(make_config(tmp_path, text=text)) == wanted
