"""Random walks over puts to an exchange: kills, power cuts, repeats, rebinding."""

import random
from dataclasses import replace

import pytest

from metaq.protocol.commands import Mput
from metaq.routing.match import Binding
from tests.broker.delay_rig import FakeSession
from tests.broker.route_rig import RouteRig
from tests.broker.route_walk import RouteWalk
from tests.sampling import examples

FOUND_WITHIN = 100
"""Walks in which a broken rule is found; each finds it with a chance above a tenth."""


class OlderBindings(RouteRig):
    """Routes by the bindings before the last change."""

    before: tuple[Binding, ...] = ()

    def bind(self, *bindings: Binding, **more: object) -> None:
        super().bind(*self.before, **more)
        self.before = bindings


class RepeatsTwice(RouteRig):
    """Does not look whether a target has a batch."""

    def begin(self, command: Mput, session: FakeSession | None = None) -> FakeSession:
        return super().begin(replace(command, producer=None, sequence=-1), session)


class AnswersAtOnce(RouteRig):
    """Answers before the disks have it."""

    def begin(self, command: Mput, session: FakeSession | None = None) -> FakeSession:
        session = super().begin(command, session)
        session.replies = session.replies or [b"result 200 0 1\r\n"]
        return session


@pytest.mark.slow
def test_each_target_has_each_message_once(rng: random.Random) -> None:
    """Whatever happens to disk, bindings and broker."""
    for _ in range(examples(20)):
        RouteWalk(rng.randrange(1 << 32)).play(100)


@pytest.mark.slow
@pytest.mark.parametrize("make", [OlderBindings, RepeatsTwice, AnswersAtOnce])
def test_a_broken_rule_is_found(rng: random.Random, make: type[RouteRig]) -> None:
    """So a walk that finds nothing says something."""
    for _ in range(FOUND_WITHIN):
        try:
            RouteWalk(rng.randrange(1 << 32), make).play(60)
        except AssertionError:
            return
    pytest.fail(f"{make.__name__} was not found")
