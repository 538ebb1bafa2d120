"""The table of an operator's orders; `test_admin.py` gives each over the socket."""

import asyncio
from typing import cast

import pytest

from metaq.broker.control import Control
from metaq.broker.health import Figures
from metaq.broker.orders import ORDERS, perform
from metaq.errors import AdminError

CONTROL = cast("Control", "a broker")


async def echo(control: Control, request: Figures) -> Figures:
    return {"broker": control, "word": request["word"]}


def test_an_order_is_a_row_and_a_function() -> None:
    """One more row is carried out, and named to those who mistype a command."""
    orders = {**ORDERS, "echo": echo}
    request = {"command": "echo", "word": "hello"}
    answer = asyncio.run(perform(CONTROL, request, orders))
    assert answer == {"broker": CONTROL, "word": "hello"}
    with pytest.raises(AdminError, match=r"'ehco': expected one of status, .*, echo$"):
        asyncio.run(perform(CONTROL, {"command": "ehco"}, orders))


def test_a_command_that_is_no_word_is_refused() -> None:
    """Anything may come out of JSON."""
    for command in (None, 7, ["status"], {}):
        with pytest.raises(AdminError, match="unknown command"):
            asyncio.run(perform(CONTROL, {"command": command}))
