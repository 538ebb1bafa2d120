"""Signals end a command where nothing is half done."""

import os
import signal

import pytest

from metaq.cli.interrupts import Interrupts


def send(*numbers: signal.Signals) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


def work_then_pause(seen: list[str]) -> None:
    with Interrupts() as interrupts:
        send(signal.SIGINT)
        seen.append("pending" if interrupts.is_pending else "lost")
        with interrupts.pause():
            seen.append("paused")


def pause(number: signal.Signals, seen: list[str]) -> None:
    with Interrupts() as interrupts, interrupts.pause():
        send(number)
        seen.append("went on")


def insist(seen: list[str]) -> None:
    with Interrupts():
        send(signal.SIGINT, signal.SIGINT)
        seen.append("went on")


def test_a_signal_waits_for_a_pause() -> None:
    """The first one ends the next pause; work before it goes on."""
    seen: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        work_then_pause(seen)
    assert seen == ["pending"]


def test_a_signal_ends_the_pause_it_comes_in() -> None:
    """At once, without a wait for the end of a read."""
    seen: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        pause(signal.SIGINT, seen)
    assert seen == []


def test_a_second_signal_ends_anything() -> None:
    """The second signal is not held back."""
    seen: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        insist(seen)
    assert seen == []


def test_sigterm_has_its_own_exit_code() -> None:
    """128 and the signal's number, as a shell counts."""
    with pytest.raises(SystemExit) as caught:
        pause(signal.SIGTERM, [])
    assert caught.value.code == 143


def test_everything_is_as_before_afterwards() -> None:
    """Also for an ignored signal: it stays ignored inside."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            send(signal.SIGTERM)
            assert not interrupts.is_pending
            assert signal.getsignal(signal.SIGINT) != signal.default_int_handler
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)
