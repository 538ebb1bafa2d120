"""A zk.zkConnect is read, or refused in a sentence that names the setting."""

from typing import Any

import pytest

from metaq.client import Client
from metaq.errors import ConfigError
from metaq.zk.servers import Servers, parse_servers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", Servers((("a", 2181),), "")),
        ("a:1,b:2/base/deep", Servers((("a", 1), ("b", 2)), "/base/deep")),
        (
            "127.0.0.1:1, [::1]:2/base/",
            Servers((("127.0.0.1", 1), ("::1", 2)), "/base"),
        ),
        ("a:1/", Servers((("a", 1),), "")),
    ],
)
def test_servers_and_root(text: str, expected: Servers) -> None:
    assert parse_servers(text) == expected


@pytest.mark.parametrize("host", ["zk1..com", ".zk1", "z" * 64, "\udcff"])
def test_a_name_that_no_resolver_takes_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"zk\.zkConnect=.*expected host:port,host"):
        parse_servers(f"127.0.0.1:1,{host}:2181/root")


@pytest.mark.parametrize(
    "text",
    ["", "host:port", ":2181", "a:99999", "[::1:2181", "zk://a:2181", "http://a"],
)
def test_a_connection_string_that_makes_no_sense_is_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"zk\.zkConnect"):
        parse_servers(text)


@pytest.mark.parametrize("hosts", [["127.0.0.1:2181"], b"127.0.0.1:2181", 2181])
def test_what_is_no_text_is_refused(hosts: Any) -> None:
    with pytest.raises(TypeError, match="zookeeper: expected str, got"):
        Client(hosts)
