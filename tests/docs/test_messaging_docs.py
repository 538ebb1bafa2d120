"""The blocks of docs/messaging.md run as they stand, one after the other."""

from typing import Any

import pytest

from metaq.testing.embedded import embedded_broker
from tests.docs.blocks import ROOT, blocks_of

PAGE = ROOT / "docs" / "messaging.md"


@pytest.mark.slow
def test_the_blocks_of_the_page_run() -> None:
    """With a broker in the process, as in tests of users."""
    blocks = [each for each in blocks_of(PAGE) if each.language == "python"]
    assert len(blocks) == 13
    topics = ("orders-dead", "shipments", "prices", "payments", "rocket", "shop")
    with embedded_broker(topics={"orders": 2, **dict.fromkeys(topics, 1)}) as broker:
        names: dict[str, Any] = {"broker": broker}
        for block in blocks:
            exec(
                compile(block.text, f"{PAGE}:{block.line}", "exec"), names
            )  # the page's own code
