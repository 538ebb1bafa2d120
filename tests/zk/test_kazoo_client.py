"""What is taken from inside kazoo is there, or refused with what to install."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from kazoo.protocol.connection import ConnectionHandler

from metaq.clock import SystemClock
from metaq.errors import ConfigError
from metaq.zk import _kazoo_client
from metaq.zk._kazoo import KazooCoordinator
from metaq.zk._kazoo_client import KAZOO_KNOWN

ROOT = Path(__file__).parents[2]


def make(hosts: str = "127.0.0.1:1") -> KazooCoordinator:
    return KazooCoordinator(hosts, session_timeout_ms=1000, clock=SystemClock())


@pytest.mark.parametrize("host", ["zk1..com", ".zk1", "z" * 64, "\udcff"])
def test_a_name_that_no_resolver_takes_is_refused(host: str) -> None:
    """It would end kazoo's thread, and nobody would hear of it."""
    with pytest.raises(ConfigError, match="expected host:port,host:port/root, got"):
        make(f"127.0.0.1:1,{host}:2181/root")


def test_the_kazoo_that_is_installed_is_one_that_is_known() -> None:
    assert make()._client.greeted_timeout_ms == 0


def invoke_otherwise(_self: Any, request: Any) -> Any:
    return request


@pytest.mark.parametrize(
    ("invoke", "got"), [(invoke_otherwise, r"\(request\)"), (None, r"\(\)")]
)
def test_a_kazoo_that_greets_otherwise_is_refused(
    monkeypatch: pytest.MonkeyPatch, invoke: Any, got: str
) -> None:
    """A session would be believed in for a time that the server never granted."""
    monkeypatch.setattr(ConnectionHandler, "_invoke", invoke)
    monkeypatch.setattr(_kazoo_client, "kazoo_version", "9.9.9")
    with pytest.raises(
        ConfigError,
        match=rf"kazoo 9\.9\.9 .*_invoke\(timeout, request, xid\), got {got}.*"
        rf"pip install '{re.escape(KAZOO_KNOWN)}'",
    ):
        make()


def test_what_is_told_to_install_is_what_is_required() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert KAZOO_KNOWN in project["dependencies"]
