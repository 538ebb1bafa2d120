"""`docs/operations.md` names exactly what there is."""

import re
from pathlib import Path

import pytest

from metaq.broker.admin import CONNECTION_COUNT_MAX, REQUEST_TIMEOUT_S
from metaq.broker.admin_socket import REQUEST_BYTES_MAX, SOCKET_NAME
from metaq.broker.health import SEVERITIES
from metaq.broker.http import CONNECTION_COUNT_MAX as HTTP_CONNECTION_COUNT_MAX
from metaq.broker.http import METRICS
from metaq.broker.orders import ORDERS
from metaq.broker.status import LOG_SERIES_MAX
from metaq.config.keys import LIMITS_KEYS, SYSTEM_KEYS, TOPIC_KEYS, ZOOKEEPER_KEYS
from metaq.config.settings import KIB, MIB, LimitsConfig
from tests.docs.metric_table import table

RECEIVE_BYTES = 256 * KIB  # what a channel takes from its socket at once

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text()
KEYS = {
    key.name
    for keys in (SYSTEM_KEYS, ZOOKEEPER_KEYS, LIMITS_KEYS, TOPIC_KEYS)
    for key in keys
}


def rows(section: str) -> list[list[str]]:
    """Return the cells of the first table of a section, without its head."""
    _, _, text = PAGE.partition(f"\n{section}\n")
    assert text, section
    table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert table, section
    lines = table[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize(
    "name", ["README.md", "docs/operations.md", "config/server.ini"]
)
def test_every_first_page_says_who_gets_in(name: str) -> None:
    """Before a stranger's messages do."""
    text = " ".join((ROOT / name).read_text().replace("\n;", "\n").split()).lower()
    assert "there is no login and no encryption" in text
    assert re.search(r"listens on every interface.{,200}loopback", text) or (
        "| every interface, ipv4 and ipv6; on loopback alone" in text
    )


def test_what_a_wheel_lacks_comes_first() -> None:
    """Before any command that needs it."""
    text = (ROOT / "README.md").read_text().partition("```")[0]
    assert "With your own ZooKeeper: `pip install metaq`" in text
    assert "`pip install 'metaq[spark]'`, which brings ZooKeeper" in text


def test_what_a_threshold_costs_is_told() -> None:
    """Later delivery, with numbers, for little."""
    _, _, text = PAGE.partition("\n### What `unflushThreshold` above 0 costs\n")
    text = " ".join(text.partition("\n## ")[0].split())
    for words in (
        "readers see synced bytes only",
        "109 ms at the median and 1.1 s at p99",
        "Puts gain little",
    ):
        assert words in text


def test_every_metric_is_listed_as_it_is() -> None:
    """`python -m tests.docs.metric_table` writes the table."""
    assert "\n" + table(METRICS) + "\n" in PAGE


def test_every_alarm_is_explained() -> None:
    """Each has its severity, a meaning and something to do."""
    found = rows("## Health")
    assert [(name, severity) for name, severity, *_ in found] == [
        (f"`{alarm.value}`", severity.value) for alarm, severity in SEVERITIES.items()
    ]
    assert all(meaning and action for _, _, meaning, action in found)


def test_every_order_is_listed() -> None:
    """The table holds them all, in the order of the code."""
    assert [name for name, _ in rows("## Administration")] == [
        f"`{order}`" for order in ORDERS
    ]


def test_settings_that_are_named_exist() -> None:
    """A word that is written like a setting is one."""
    named = set(re.findall(r"`([a-z]+(?:[A-Z][A-Za-z]*)+)`", PAGE))
    assert named
    assert named - KEYS == set()


def test_metrics_that_are_named_exist() -> None:
    """Advice does not speak of a metric of yesterday."""
    named = set(re.findall(r"\bmetaq_[a-z_]+\b", PAGE))
    assert named - {metric.spec.name for metric in METRICS} == set()


def test_numbers_are_those_of_the_code() -> None:
    """Bounds and defaults that the page tells are true."""
    limits = LimitsConfig()
    command_bytes = (
        max(limits.payload_bytes_max, limits.batch_bytes_max)
        + limits.line_bytes_max
        + RECEIVE_BYTES
    )
    connection_mib = limits.connection_buffer_bytes_max // MIB
    for text in (
        f"first {LOG_SERIES_MAX:,} partitions",
        f"{REQUEST_TIMEOUT_S:.0f} seconds to send a request",
        f"at most {REQUEST_BYTES_MAX // KIB} KiB",
        f"one of {CONNECTION_COUNT_MAX} connections",
        f"HTTP has {HTTP_CONNECTION_COUNT_MAX} connections",
        f"`inFlightBytesMax` | {limits.in_flight_bytes_max // MIB} MiB",
        f"| {command_bytes / MIB:.1f} MiB |",
        f"{RECEIVE_BYTES // KIB} KiB of one read",
        f"`connectionBufferBytesMax` | {limits.connection_buffer_bytes_max // MIB} MiB",
        f"{limits.connection_count_max:,} times {connection_mib} MiB",
        f"| {limits.waiters_max * KIB / MIB:.0f} MiB |",
        f"`{SOCKET_NAME}`",
    ):
        assert text in PAGE, text
