"""Check of the dead-letter topics at the beginning of a `run`.

Without it, a missing topic would block a partition at the first message that is given
up, perhaps days later. The dead-letter topic of a topic that matches a pattern only
during the run is created with its first dead letter, or reported by `health()`; ending
the run would stop the other topics.
"""

import logging
from collections.abc import Collection, Iterable

from metaq.client.cluster.catalog import read_cluster
from metaq.client.cluster.context import ClientContext
from metaq.client.cluster.presence import missing_topics
from metaq.client.consume.redelivery import RetryPolicy, dead_letter_topic
from metaq.client.errors import NoTopicError
from metaq.client.names import check_topic, near_topics
from metaq.errors import CoordinationError, NoBrokerError

_log = logging.getLogger(__name__)


class LetterTopics:
    """Dead-letter topics of one run. Owned by the run. Concurrency: one loop."""

    def __init__(
        self, context: ClientContext, policy: RetryPolicy, topics: Collection[str]
    ) -> None:
        """Create it; nothing is checked yet.

        Args:
            context: the client's parts.
            policy: policy of the run; without dead letters nothing is ever checked.
            topics: topics of the consumer; more may match its patterns later.
        """
        self._context = context
        self._policy = policy
        self._topics = topics
        self._found: set[str] = set()
        self._was_refused = False

    async def require(self, timeout: float | None) -> None:
        """Create missing dead-letter topics, or refuse to run without them.

        If the cluster cannot be asked, a warning is logged and the run begins, because
        its messages may still be available.

        Args:
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            NoTopicError: one is missing, and the policy does not create it.
            ConfigError: the name of one is invalid.
            MetaqError: one cannot be created, as `AsyncAdmin.create_topic` says.
        """
        await self._require(self._topics, timeout)

    async def make(self, topic: str, timeout: float | None) -> None:
        """Create the dead-letter topic of a topic if it is missing and the policy does.

        After a refusal it is at least checked, because it may have been deleted: the
        error of `require` has advice, that of the broker has none.

        Raises:
            MetaqError: as `require`.
        """
        if self._policy.create_dead_letter_topic or self._was_refused:
            await self._require([topic], timeout)

    def forget(self) -> None:
        """Check again before the next dead letter, because one was refused."""
        self._was_refused = True
        self._found.clear()

    def problems(self) -> list[str]:
        """Return a sentence for each missing dead-letter topic; without a request.

        Only a consumer with patterns reads topics that `require` did not check, and
        only such a consumer has the names of all topics in its snapshot.
        """
        names = self._context.metadata.snapshot.names
        if names is None or self._policy.create_dead_letter_topic:
            return []
        return [_missing(name) for name in sorted(self._unseen(self._topics) - names)]

    def _unseen(self, topics: Iterable[str]) -> set[str]:
        if self._policy.then != "dead_letter":
            return set()
        return {dead_letter_topic(self._policy, topic) for topic in topics}.difference(
            self._found
        )

    async def _require(self, topics: Iterable[str], timeout: float | None) -> None:
        context, names = self._context, sorted(self._unseen(topics))
        if not names:
            return
        for name in names:
            check_topic(name, "dead-letter topic")
        try:
            deadline_s = context.deadline_s(timeout)
            snapshot = await read_cluster(context, names, deadline_s=deadline_s)
        except (CoordinationError, NoBrokerError) as error:
            _log.warning("cannot look for dead-letter topics: error=%s", error)
            return
        # A broker that has never answered may have the topic.
        missing = () if snapshot.silent else missing_topics(snapshot, names)
        for name in missing:
            if name in snapshot.puts:
                continue
            if not self._policy.create_dead_letter_topic:
                raise NoTopicError(_missing(name))
            assert context.make_topic is not None
            await context.make_topic(name, timeout)
        self._found.update(names)


def _missing(name: str) -> str:
    return f"dead-letter topic '{name}' does not exist; {near_topics(name, ())}"
