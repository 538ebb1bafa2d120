"""Jars of other people's Java programs, as Ivy finds them."""

import pytest

from tests.java.jars import Artifact, NoJarsError, find_jars

NETTY = Artifact("io.netty", "netty-common", "4.1.114.Final")


def test_jars_of_one_name_for_several_machines_are_all_kept() -> None:
    """RocketMQ's broker could not be had: its netty has a jar for each system."""
    try:
        find_jars(NETTY)
    except NoJarsError as error:
        pytest.skip(str(error))
    names = {jar.name for jar in find_jars(NETTY._replace(name="netty-all"))}
    assert {
        f"netty-transport-native-kqueue-{NETTY.version}-osx-{machine}.jar"
        for machine in ("x86_64", "aarch_64")
    } <= names
