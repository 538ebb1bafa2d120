"""`docs/messaging.md` has the numbers of the code."""

from pathlib import Path

from metaq.broker.exchanges import BINDINGS_ALL_MAX
from metaq.broker.mailboxes import KEPT_S, MAILBOXES_MAX, REPLIES_MAX, REPLY_BYTES_MAX
from metaq.broker.queue_takers import TAKE_BYTES_MAX, TAKE_COUNT_MAX
from metaq.client.queue.settling import LATER_S
from metaq.config.settings import MIB, LimitsConfig
from metaq.protocol.queue_frames import SETTLE_COUNT_MAX
from metaq.routing.match import BINDINGS_MAX
from metaq.zk.group_definitions import DELAY_MS_MAX

ROOT = Path(__file__).parents[2]


def test_numbers_are_those_of_the_code() -> None:
    """Bounds and times that the page promises; a change of one is a change of both."""
    page = " ".join((ROOT / "docs" / "messaging.md").read_text().split())
    limits = LimitsConfig()
    for text in (
        f"`queueOpenMax`, {limits.queue_open_max:,} |",
        f"`queueOpenBrokerMax`, {limits.queue_open_broker_max:,} |",
        f"of one `take` | {TAKE_COUNT_MAX:,}, {TAKE_BYTES_MAX // MIB} MiB |",
        f"entries of one `settle` | {SETTLE_COUNT_MAX:,} |",
        f"of `retry_delays_s` | {DELAY_MS_MAX // 3_600_000} h |",
        f"of all exchanges | {BINDINGS_MAX:,}, {BINDINGS_ALL_MAX:,} |",
        f"mailboxes of a broker | {MAILBOXES_MAX:,} |",
        f"one mailbox | {REPLIES_MAX:,}, {REPLY_BYTES_MAX // MIB} MiB |",
        f"It is kept for {KEPT_S:.0f} s after the connection",
        f"are batched for up to {LATER_S * 1000:.0f} ms",
    ):
        assert text in page, text
