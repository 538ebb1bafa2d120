"""Failing handlers: attempts for a message, its fate after the last one, and the log.

A handler that returns has handled its message. One that raises gets the same message
again after a pause, up to a bound; one that raises `Reject` does not. A message given
up goes where the policy says. These decisions are pure functions of the policy.

The log has the first failure of a kind with its traceback. A kind is the type of the
error and the line that raised it. A handler that fails with every message would else
bury the log; repetitions are counted (`failure_count`) and told at DEBUG.

Source: client spec 11.3 and 12.
"""

import logging
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from metaq.client.validation import check_seconds, check_whole
from metaq.config.topic_rules import is_safe_topic
from metaq.errors import ConfigError
from metaq.retry import Backoff

DEAD_LETTER_SUFFIX: Final = ".dead"
"""Default suffix of the topic of dead letters."""

LastResort: TypeAlias = Literal["stop", "dead_letter", "park", "drop"]
"""Fate of a message that is given up."""

_LAST_RESORTS: Final = ("stop", "dead_letter", "park", "drop")
_PLACES: Final = {"dead_letter_topic": "dead_letter", "park_dir": "park"}

KINDS_MAX: Final = 100
"""Kinds that are remembered; errors of code that is made anew all the time are many."""


class Reject(Exception):  # noqa: N818  # an order of the handler, not an error
    """Raised by a handler: this message will never succeed, so give it up now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Policy for failing handlers."""

    attempts_max: int = 6
    """Number of attempts for one message, 1 or more; 6 is MetaQ's number. A member that
    takes the partition over, or a new process, counts from the start."""
    first_s: float = 0.5
    """Longest pause before the second attempt; doubles from there. The partition
    waits, the others go on."""
    max_s: float = 30.0
    """Longest pause between attempts."""
    then: LastResort = "stop"
    """A message given up ends `run` with `HandlerFailedError` ("stop"), goes to another
    topic ("dead_letter"), waits in the local retry store ("park"), or counts as handled
    with a line in the log ("drop")."""
    dead_letter_topic: str | None = None
    """Topic of dead letters; None: the message's topic with `.dead` behind it. The
    brokers must have it: as long as no broker takes a dead letter, its partition waits,
    and `health` says so."""
    park_dir: Path | str | None = None
    """With "park": directory of the local retry store; one process at a time."""
    replay_first_s: float = 5.0
    """With "park": when its messages are handled for the first time."""
    replay_interval_s: float = 300.0
    """With "park": pause between rounds; in each the handler gets every message of
    the store once. The order among these and other messages is lost."""

    def __post_init__(self) -> None:
        """Refuse contradictions.

        Raises:
            ConfigError: a number is out of range, a directory is missing, or a place
                is named that nothing goes to.
        """
        check_whole("attempts_max", self.attempts_max, 1)
        check_seconds("first_s", self.first_s, may_be_zero=False)
        check_seconds("max_s", self.max_s, may_be_zero=False)
        check_seconds("replay_first_s", self.replay_first_s)
        check_seconds("replay_interval_s", self.replay_interval_s, may_be_zero=False)
        if self.first_s > self.max_s:
            raise ConfigError(
                f"expected 0 < first_s <= max_s, got {self.first_s} and {self.max_s}"
            )
        if self.then not in _LAST_RESORTS:
            raise ConfigError(
                f"then: expected one of {', '.join(_LAST_RESORTS)}, got {self.then!r}"
            )
        topic = self.dead_letter_topic
        if topic is not None and not is_safe_topic(topic):
            raise ConfigError(
                f"dead_letter_topic: expected a name without blanks, got {topic!r}"
            )
        if self.then == "park" and self.park_dir is None:
            raise ConfigError("then='park' needs a park_dir")
        for name, then in _PLACES.items():
            value = getattr(self, name)
            if value is not None and self.then != then:
                # A named place for such messages promises that none is lost.
                raise ConfigError(
                    f"{name}: expected then={then!r} with it, got {value!r} and"
                    f" then={self.then!r}"
                )


DEFAULT_POLICY: Final = RetryPolicy()
"""Six attempts, then the end: nothing is lost, and nothing fails in silence."""


def next_delay_s(
    policy: RetryPolicy, attempts: int, error: BaseException
) -> float | None:
    """Return the pause before a message is handed out again; None: it is given up.

    Args:
        policy: policy chosen by the user.
        attempts: how often the handler had it, 1 or more.
        error: the handler's last exception.
    """
    if isinstance(error, Reject) or attempts >= policy.attempts_max:
        return None
    return Backoff(first_s=policy.first_s, max_s=policy.max_s).delay_s(attempts)


def dead_letter_topic(policy: RetryPolicy, topic: str) -> str:
    """Return the topic that dead letters of `topic` go to."""
    return policy.dead_letter_topic or topic + DEAD_LETTER_SUFFIX


class FailureLog:
    """The failures of one `run`. Owner: its handling; on the loop."""

    def __init__(self, log: logging.Logger) -> None:
        """Begin without a failure; write to `log`."""
        self._log = log
        self._kinds: set[tuple[type[BaseException], str, int]] = set()

    def tell(self, text: str, error: BaseException, *, is_last: bool) -> None:
        """Write one line, and the traceback where it is the first of its kind.

        Args:
            text: the line.
            error: the handler's exception.
            is_last: the message is given up: never below WARNING.
        """
        kind = _kind_of(error)
        is_new = kind not in self._kinds and len(self._kinds) < KINDS_MAX
        if is_new:
            self._kinds.add(kind)
        level = logging.WARNING if is_new or is_last else logging.DEBUG
        self._log.log(level, "%s", text, exc_info=error if is_new else None)


def _kind_of(error: BaseException) -> tuple[type[BaseException], str, int]:
    """Return the type of an error, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    if not frames:
        return type(error), "", 0
    return type(error), frames[0].filename, frames[0].lineno or 0
