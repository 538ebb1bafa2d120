"""A reserved port: no other program is given it, none answers there, its owner may."""

import errno
import gc
import socket
import struct
from pathlib import Path

import pytest

from metaq.testing.embedded import EmbeddedBroker
from metaq.testing.fake_broker import FakeBroker
from metaq.testing.proxy import Proxy
from metaq.testing.servers import HOST, reserve_port
from tests.rigs.ports import reserved_port
from tests.rigs.process import BrokerProcess
from tests.rigs.waiting import wait_until

IP_LOCAL_PORT_RANGE = 51
"""Socket option of Linux 6.3: the ports that a socket may be given."""


def is_given_away(port: int) -> bool:
    """Tell whether the system gives a port to a program that names none."""
    with socket.socket() as sock:
        only = struct.pack("=I", port << 16 | port)
        try:
            sock.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, only)
        except OSError as error:
            if error.errno != errno.ENOPROTOOPT:
                raise
            pytest.skip("this kernel cannot be asked for one port alone")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((HOST, 0))
        except OSError:
            return False
        return True


def test_a_port_is_the_owner_s_until_it_is_gone() -> None:
    class Owner:
        pass

    def is_it() -> bool:
        owner = Owner()
        port = reserve_port(owner)
        assert not is_given_away(port)
        del owner
        gc.collect()
        return is_given_away(port)

    # Another test may be given a port that was let go.
    wait_until(is_it)


def test_a_port_is_kept_inside_a_block() -> None:
    def is_it() -> bool:
        with reserved_port() as port:
            assert not is_given_away(port)
        return is_given_away(port)

    wait_until(is_it)


@pytest.mark.parametrize("address", [(HOST, 0), ("", 0), ("::", 0)])
def test_a_server_that_names_the_port_may_listen_again_and_again(
    address: tuple[str, int],
) -> None:
    """On any address; between two of them callers are refused."""
    is_6 = ":" in address[0]
    family = socket.AF_INET6 if is_6 else socket.AF_INET
    if is_6 and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with reserved_port() as port:
        for _ in range(2):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((HOST, port))
            with (
                socket.create_server(
                    (address[0], port), family=family, dualstack_ipv6=is_6
                ),
                socket.create_connection((HOST, port)),
            ):
                assert not is_given_away(port)
        assert not is_given_away(port)


def test_a_port_on_which_somebody_listens_is_not_kept() -> None:
    with (
        socket.create_server((HOST, 0)) as server,
        pytest.raises(OSError, match="in use"),
        reserved_port(server.getsockname()[1]),
    ):
        raise AssertionError("kept")


def test_a_fake_broker_that_went_away_comes_back_to_its_port() -> None:
    with FakeBroker() as broker:
        broker.go_away()
        assert not is_given_away(broker.port)
        broker.come_back(port=0)
        broker.go_away()
        assert not is_given_away(broker.port)
    assert not is_given_away(broker.port)


def test_a_proxy_that_refuses_keeps_its_port() -> None:
    with Proxy(HOST, 1) as proxy:
        proxy.refuse()
        assert not is_given_away(proxy.port)


def test_a_broker_that_is_stopped_keeps_its_port(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path / "data") as broker:
        broker.stop()
        assert not is_given_away(broker.port)


def test_a_broker_in_a_process_has_its_port_before_it_starts(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path / "data", topic="t")
    assert not is_given_away(broker.port)
