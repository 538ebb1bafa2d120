"""Decides which topic definitions are in effect on a broker. Pure.

A section of `server.ini` with the same name overrides a definition. A definition that
cannot be read, or that this broker cannot serve, is refused, and the one accepted
before stays in effect. A definition that disappears without having been deleted
(ZooKeeper was wiped, a node removed by hand) stays in effect while there is data,
because that still needs its retention. A definition that is `deleting` is obeyed unless
a section of `server.ini` still defines the topic.
"""

import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from metaq.broker.schedule import local_timezone, parse_schedule
from metaq.config.load import define_topic
from metaq.config.settings import BrokerConfig, TopicConfig
from metaq.config.topic_rules import is_pattern
from metaq.errors import ConfigError
from metaq.model import BrokerId
from metaq.zk.definitions import Effect, TopicDefinition, TopicState, TopicStatus
from metaq.zk.paths import is_legal_step

Found = Mapping[str, TopicDefinition | str]
"""Topic → its definition, or the reason why that cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """Decision about all definitions together."""

    accepted: Mapping[str, TopicDefinition]
    """Definitions to store on the disk; they stay in effect without ZooKeeper."""
    defined: Mapping[str, TopicConfig]
    """Topics to serve (some for gets only); `server.ini` overrides them."""
    deleting: frozenset[str]
    statuses: Mapping[str, TopicStatus]
    refused: frozenset[str]
    """Topics with no definition in effect, so that their settings are unknown."""
    problems: tuple[str, ...]
    """One sentence for each definition that needs an operator's attention."""


@dataclass(frozen=True, slots=True)
class _Decision:
    """Decision about one definition."""

    accepted: TopicDefinition | None
    """Definition to store: this one, the one accepted before, or none."""
    status: TopicStatus | None = None
    """Status to publish; None: publish none."""
    problem: str = ""
    """Sentence for the operator; "" for none."""
    is_refused: bool = False


def decide(
    found: Found | None,
    accepted: Mapping[str, TopicDefinition],
    config: BrokerConfig,
    *,
    has_log: Callable[[str], bool],
    removed: Collection[str] = (),
) -> Decisions:
    """Decide which definitions are in effect on this broker.

    Args:
        found: the definitions in ZooKeeper; None: never read.
        accepted: the definitions accepted before.
        config: `server.ini`, which wins.
        has_log: whether the broker has data of a topic.
        removed: topics in deletion whose data here has been removed.
    """
    decisions = {
        topic: _decide_present(topic, definition, accepted.get(topic), config)
        for topic, definition in (accepted if found is None else found).items()
    }
    for topic, definition in accepted.items():
        if topic not in decisions:
            is_held = (
                has_log(topic)
                if definition.state is TopicState.ACTIVE
                else topic not in removed
            )
            decisions[topic] = _decide_gone(topic, definition, is_held=is_held)
    kept = {
        topic: decision.accepted
        for topic, decision in sorted(decisions.items())
        if decision.accepted is not None
    }
    statuses = {topic: each.status for topic, each in decisions.items() if each.status}
    defined = _defined_topics(kept, config, has_log)
    return Decisions(
        accepted=MappingProxyType(kept),
        defined=MappingProxyType(defined),
        deleting=frozenset(
            topic
            for topic, definition in kept.items()
            if definition.state is TopicState.DELETING
        ),
        statuses=MappingProxyType(_sections(config) | statuses),
        refused=frozenset(
            topic
            for topic, decision in decisions.items()
            if decision.is_refused and topic not in defined
        ),
        problems=tuple(
            decision.problem
            for _, decision in sorted(decisions.items())
            if decision.problem
        ),
    )


def _sections(config: BrokerConfig) -> dict[str, TopicStatus]:
    """Return the statuses of `server.ini` sections, which commands ask for."""
    status = TopicStatus(definition=0, effect=Effect.OVERRIDDEN, text=config.path)
    return {
        name: status
        for name in config.topics
        if is_legal_step(name) and not is_pattern(name)
    }


def _decide_present(
    topic: str,
    definition: TopicDefinition | str,
    before: TopicDefinition | None,
    config: BrokerConfig,
) -> _Decision:
    """Return the decision about a definition that is in ZooKeeper."""
    if isinstance(definition, str):
        problem = f"definition of topic '{topic}' cannot be read: {definition}"
        return _Decision(before, None, problem, is_refused=True)

    def status(effect: Effect, text: str = "") -> TopicStatus:
        return TopicStatus(definition=definition.checksum, effect=effect, text=text)

    if definition.state is TopicState.DELETING:
        is_begun = before is not None and before.state is TopicState.DELETING
        if topic not in config.topics or is_begun:
            return _Decision(definition)
        problem = f"topic '{topic}' is not deleted: {config.path} defines it"
        return _Decision(before, status(Effect.OVERRIDDEN, config.path), problem)
    try:
        settings = _configure(topic, definition, config)
    except ConfigError as error:
        problem = f"definition of topic '{topic}' is refused: {error}"
        refusal = status(Effect.REFUSED, str(error))
        return _Decision(before, refusal, problem, is_refused=True)
    if topic in config.topics:
        return _Decision(definition, status(Effect.OVERRIDDEN, config.path))
    if not definition.names(BrokerId(config.system.broker_id)):
        return _Decision(definition)
    puts, gets = settings.accept_publish, settings.accept_subscribe
    closed = {"takes no puts": not puts, "gives no gets": not gets}
    text = ", ".join(each for each, is_so in closed.items() if is_so)
    in_effect = status(Effect.IN_EFFECT, text)
    return _Decision(definition, replace(in_effect, takes_puts=puts, gives_gets=gets))


def _decide_gone(
    topic: str, definition: TopicDefinition, *, is_held: bool
) -> _Decision:
    """Return the decision about a definition that is no longer in ZooKeeper."""
    if not is_held:
        return _Decision(None)
    if definition.state is TopicState.DELETING:
        return _Decision(definition)
    brokers = (
        "all" if definition.brokers is None else ",".join(map(str, definition.brokers))
    )
    words = ["metaq", "topics", "alter", topic, "--brokers", brokers]
    for key, text in definition.settings.items():
        words += ["--set", f"{key}={text}"]
    problem = (
        f"definition of topic '{topic}' is missing in ZooKeeper and stays in effect on"
        " this broker: delete the topic, or restore the definition:"
        f" {shlex.join(words)}"
    )
    return _Decision(definition, None, problem)


def _defined_topics(
    accepted: Mapping[str, TopicDefinition],
    config: BrokerConfig,
    has_log: Callable[[str], bool],
) -> dict[str, TopicConfig]:
    """Return the settings of accepted topics that are not being deleted."""
    defined = {}
    for topic, definition in accepted.items():
        if definition.state is TopicState.DELETING:
            continue
        try:
            settings = _configure(topic, definition, config)
        except ConfigError:
            continue  # Accepted under another [system]; reported above.
        if definition.names(BrokerId(config.system.broker_id)):
            defined[topic] = settings
        elif has_log(topic):
            # Consumers may still read the stored messages.
            defined[topic] = replace(settings, accept_publish=False)
    return defined


def _configure(
    topic: str, definition: TopicDefinition, config: BrokerConfig
) -> TopicConfig:
    """Return the settings of a topic from its definition.

    Raises:
        ConfigError: this broker cannot serve them.
    """
    settings = define_topic(
        topic, definition.partitions, definition.settings, system=config.system
    )
    try:
        parse_schedule(settings.delete_when, local_timezone())
    except ConfigError as error:
        raise ConfigError(f"topic '{topic}' deleteWhen: {error}") from error
    return settings
