"""Errors of requests whose outcome is not known say so, and only those."""

import re

import pytest

from metaq.zk.errors import cut_off, no_answer

DOUBT = "; it may be carried out nevertheless"


@pytest.mark.parametrize("what", ["get", "exists", "children", "sync", "watch"])
def test_a_read_without_an_answer_changed_nothing(what: str) -> None:
    assert str(no_answer(what, "/a", 1.999)) == (
        f"{what} /a: no answer from ZooKeeper in 2 s"
    )
    assert "nevertheless" not in str(cut_off(what, "/a"))


@pytest.mark.parametrize("what", ["create", "set", "replace", "delete", "transact"])
def test_a_change_without_an_answer_may_be_carried_out(what: str) -> None:
    assert re.search(
        f"^{what} /a: .* in 0.5 s{DOUBT}$", str(no_answer(what, "/a", 0.5))
    )
    assert str(cut_off(what, "/a")).endswith(f" lost before the answer{DOUBT}")
