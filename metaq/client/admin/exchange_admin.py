"""Administration calls about exchanges and bindings."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final, Literal, TypeAlias

from metaq.client.admin.broker_admin import AdminCall
from metaq.client.admin.scheduled_admin import AsyncScheduledAdmin
from metaq.client.cluster.context import ClientContext
from metaq.client.consume.browse import stats_text
from metaq.client.errors import ExchangeError, NoExchangesError
from metaq.client.fan_out import all_of
from metaq.client.names import check_topic, require_text
from metaq.client.options import load_filter
from metaq.client.validation import wrong_type
from metaq.errors import ConfigError, NoBrokerError, RequestTimeoutError
from metaq.filter.language import ANY_FILTER
from metaq.model import BrokerAddress, BrokerId, is_internal, no_items
from metaq.peer.connection import BrokerConnection
from metaq.record.flags import Headers, list_headers
from metaq.routing.match import (
    BINDINGS_MAX,
    Binding,
    ExchangeKind,
    Matcher,
    check_binding,
    names_checksum,
)
from metaq.zk.definitions import TopicState, decode_definition, or_error
from metaq.zk.errors import NodeChangedError, NoNodeError
from metaq.zk.exchange_definitions import (
    ExchangeDefinition,
    binding_name,
    decode_binding,
    decode_exchange,
    encode_binding,
    encode_exchange,
    sends_rest_to,
    sends_to,
    with_bindings,
)
from metaq.zk.group_definitions import decode_group
from metaq.zk.session import WriteNode
from metaq.zk.znodes import Node

Kind: TypeAlias = Literal["direct", "fanout", "topic", "headers"]
ASK_S_MAX: Final = 1.0
"""Time-out of one request to a broker, in seconds; one that has just ended is still
registered for a while."""
POLL_S: Final = 0.02
"""Interval between checks whether the brokers have a change, in seconds."""


class AsyncExchangeAdmin(AsyncScheduledAdmin):
    """The part of `AsyncAdmin` about exchanges; needs ZooKeeper."""

    async def exchanges(
        self, timeout: float | None = None
    ) -> Mapping[str, ExchangeDefinition]:
        """Return the exchanges by name, ascending, with their bindings.

        Args:
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            ConfigError: the client has no ZooKeeper.
            CoordinationError: ZooKeeper cannot be asked.
        """
        here = await _reach(self._context, timeout)
        found = await here.values(here.paths.exchanges(), decode_exchange)
        return {
            name: await here.bound(name, each)
            for name, each in found.items()
            if not each.is_deleted
        }

    async def unread_definitions(self, timeout: float | None = None) -> tuple[str, ...]:
        """Return a sentence for each definition that this version cannot read.

        A newer version has made them; `queue_groups` and `exchanges` leave them out.

        Args:
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            ConfigError: the client has no ZooKeeper.
            CoordinationError: ZooKeeper cannot be asked.
        """
        await load_filter(ANY_FILTER)  # one of the groups may have a filter
        here = await _reach(self._context, timeout)
        groups = await here.values(
            here.paths.queue_groups(), partial(or_error, decode_group)
        )
        exchanges = await here.values(
            here.paths.exchanges(), partial(or_error, decode_exchange)
        )
        found = [
            f"definition of {kind} '{name}' cannot be read: {each}"
            for kind, values in (("queue group", groups), ("exchange", exchanges))
            for name, each in values.items()
            if isinstance(each, str)
        ]
        for name, each in exchanges.items():
            if isinstance(each, ExchangeDefinition) and not each.is_deleted:
                unread = (await here.bound(name, each)).unread
                found += [
                    f"binding {one} of exchange '{name}' cannot be read: {text}"
                    for one, text in unread.items()
                ]
        return tuple(found)

    async def create_exchange(
        self,
        exchange: str,
        kind: Kind = "topic",
        *,
        alternate: str | None = None,
        timeout: float | None = None,
    ) -> ExchangeDefinition:
        """Create an exchange, and wait until the brokers serve it.

        Args:
            exchange: name of the exchange; must not be the name of a topic.
            kind: "direct": bindings have a routing key; "fanout": all bindings match;
                "topic": bindings have a pattern; "headers": bindings have headers.
            alternate: an existing topic for messages that match no binding.
            timeout: seconds; None takes `request_timeout_s`.

        Returns:
            Its definition.

        Raises:
            ExchangeError: an exchange or topic of that name exists.
            ConfigError: a name or the kind is invalid, the alternate topic does not
                exist, or the client has no ZooKeeper.
            NoExchangesError: a broker has an older version; nothing was created.
            RequestTimeoutError: some brokers did not have it in time; it is created.
            CoordinationError: ZooKeeper cannot be asked, or another client created it
                at the same time.
            TypeError: an argument has a wrong type; the text names it.

        Cancellation: it may be created.
        """
        check_topic(exchange, "exchange")
        if is_internal(exchange):
            raise ConfigError(f"exchange: '{exchange}' is a name reserved for brokers")
        if kind not in [each.value for each in ExchangeKind]:
            raise ConfigError(
                f"kind: expected direct, fanout, topic or headers, got {kind!r}"
            )
        if alternate is not None:
            check_topic(alternate, "alternate")
        definition = ExchangeDefinition(kind=ExchangeKind(kind), alternate=alternate)
        here = await _reach(self._context, timeout)
        version, old = await here.look(exchange)
        if old is not None:
            raise ExchangeError(
                f"exchange '{exchange}' exists, of kind {old.kind.value}"
            )
        await here.require_exchanges()
        if await here.brokers_of(exchange) is not None:
            raise ExchangeError(f"exchange '{exchange}': a topic has that name")
        if alternate is not None:
            await here.require_served(alternate)
        await here.unbind_all(exchange)  # an earlier deletion may be incomplete
        path, data = here.paths.exchange(exchange), encode_exchange(definition)
        await here.write_with(alternate, path, data, version)
        await here.wait_in_effect(exchange)
        return definition

    async def delete_exchange(
        self, exchange: str, timeout: float | None = None
    ) -> None:
        """Delete an exchange with its bindings, and wait until brokers refuse it.

        The topics stay.

        Args:
            exchange: name of the exchange.
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            ExchangeError: there is no such exchange.
            ConfigError: the client has no ZooKeeper.
            RequestTimeoutError: some brokers still had it at the end; it is deleted.
            CoordinationError: ZooKeeper cannot be asked.
            TypeError: the name is not a string.
        """
        here = await _reach(self._context, timeout)
        old = await here.find(exchange)
        data = encode_exchange(replace(old, is_deleted=True))
        await here.put(here.paths.exchange(exchange), data)
        await here.unbind_all(exchange)
        await here.wait_in_effect(exchange, is_deleted=True)

    async def bind(
        self,
        exchange: str,
        topic: str,
        *,
        key: str = "",
        headers: Mapping[str, str | None] = no_items(),  # stays empty
        match: Literal["all", "any"] = "all",
        timeout: float | None = None,
    ) -> Binding:
        """Bind an exchange to a topic, and wait until the brokers route accordingly.

        An existing binding is not an error.

        Args:
            exchange: name of the exchange.
            topic: an existing topic, which all brokers serve.
            key: routing key for a direct exchange; pattern for a topic exchange: words
                separated by dots, `*` for one word, `#` for any number of words.
            headers: name → value for a headers exchange; None matches any value.
            match: whether all headers must match, or any of them.
            timeout: seconds; None takes `request_timeout_s`.

        Returns:
            The binding.

        Raises:
            ExchangeError: there is no such exchange, or it has too many bindings.
            ConfigError: the binding is invalid for this exchange, a broker does not
                serve the topic, or the client has no ZooKeeper.
            NoExchangesError: a broker has an older version; nothing was bound.
            RequestTimeoutError: some brokers did not have it in time; it is bound.
            CoordinationError: ZooKeeper cannot be asked.
            TypeError: an argument has a wrong type; the text names it.

        Cancellation: it may be bound.
        """
        binding = _binding_of(topic, key, headers, match)
        here = await _reach(self._context, timeout)
        definition = await here.find(exchange)
        check_binding(definition.kind, binding)
        await here.require_exchanges()
        await here.require_served(topic)
        known = await here.children(here.paths.bindings(exchange))
        path = here.paths.binding(exchange, binding_name(binding))
        if binding_name(binding) not in known:
            if len(known) >= BINDINGS_MAX:
                raise ExchangeError(
                    f"exchange '{exchange}': expected at most {BINDINGS_MAX} bindings"
                )
            with suppress(NodeChangedError):  # another client has just bound it
                await here.write_with(topic, path, encode_binding(binding), None)
        await here.wait_in_effect(exchange)
        return binding

    async def unbind(
        self,
        exchange: str,
        topic: str,
        *,
        key: str = "",
        headers: Mapping[str, str | None] = no_items(),  # as above
        match: Literal["all", "any"] = "all",
        timeout: float | None = None,
    ) -> bool:
        """Delete a binding, and wait until the brokers no longer use it.

        Args:
            exchange: as in `bind`, like the other arguments.
            topic: likewise.
            key: likewise.
            headers: likewise.
            match: likewise.
            timeout: likewise.

        Returns:
            Whether there was such a binding.

        Raises:
            As `bind`.
        """
        binding = _binding_of(topic, key, headers, match)
        here = await _reach(self._context, timeout)
        await here.find(exchange)
        path = here.paths.binding(exchange, binding_name(binding))
        was_there = await here.delete(path)
        await here.wait_in_effect(exchange)
        return was_there

    async def route(
        self,
        exchange: str,
        routing_key: str = "",
        *,
        headers: Headers = (),
        timeout: float | None = None,
    ) -> tuple[Binding, ...]:
        """Return the bindings that a message would match; nothing is sent.

        Args:
            exchange: name of the exchange.
            routing_key: routing key of the message.
            headers: names and values of the message's headers.
            timeout: seconds; None takes `request_timeout_s`.

        Returns:
            Matching bindings by topic; () if none matches. A topic with several of them
            gets the message once.

        Raises:
            ExchangeError: there is no such exchange, or a binding cannot be read.
            ConfigError: the client has no ZooKeeper, or too many patterns may match.
            CoordinationError: ZooKeeper cannot be asked.
            TypeError: an argument has a wrong type; the text names it.
        """
        require_text("routing_key", routing_key)
        pairs = list_headers(headers) if headers else ()
        here = await _reach(self._context, timeout)
        definition = await here.find(exchange)
        bound, matcher = (
            await here.bound(exchange, definition),
            Matcher(definition.kind),
        )
        for text in bound.unread.values():
            raise ExchangeError(f"exchange '{exchange}': {text}")
        matcher.replace(bound.bindings)
        return tuple(matcher.find(routing_key, pairs))


def _binding_of(topic: str, key: str, headers: object, match: str) -> Binding:
    check_topic(topic)
    require_text("key", key)
    if not isinstance(headers, Mapping) or not all(
        isinstance(name, str) and isinstance(value, str | None)
        for name, value in headers.items()
    ):
        raise wrong_type("headers", "a dict of names and texts, or None", headers)
    if match not in {"all", "any"}:
        raise ConfigError(f"match: expected 'all' or 'any', got {match!r}")
    pairs = tuple(sorted(headers.items()))
    return Binding(topic, key, pairs, matches_any=bool(pairs) and match == "any")


async def _reach(context: ClientContext, timeout: float | None) -> "_Exchanges":
    deadline_s = await context.reach(timeout)
    return _Exchanges(context, deadline_s, "exchanges are kept in")


class _Exchanges(AdminCall):
    """The exchanges of a cluster, for one call."""

    @property
    def there(self) -> Mapping[BrokerId, BrokerAddress]:
        """Addresses of the registered leaders."""
        return self.context.metadata.snapshot.leaders()

    async def look(self, exchange: str) -> tuple[int | None, ExchangeDefinition | None]:
        """Return the version of an exchange's node, and its definition.

        None for a missing node; no definition if it is deleted.
        """
        check_topic(exchange, "exchange")
        node = await self.get(self.paths.exchange(exchange))
        if node is None:
            return None, None
        found = decode_exchange(node.data)
        return node.version, None if found.is_deleted else found

    async def find(self, exchange: str) -> ExchangeDefinition:
        _, found = await self.look(exchange)
        if found is None:
            raise ExchangeError(f"no exchange '{exchange}'")
        return found

    async def bound(
        self, name: str, definition: ExchangeDefinition
    ) -> ExchangeDefinition:
        """Return an exchange with its bindings."""
        decode = partial(or_error, decode_binding)
        return with_bindings(
            definition, await self.values(self.paths.bindings(name), decode)
        )

    async def sending_to(self, topic: str) -> list[str]:
        """Return the exchanges that send to a topic, or may: unreadable ones."""
        rests = await self.values(self.paths.exchanges(), partial(sends_rest_to, topic))
        found = []
        for name, is_sent in rests.items():
            path = self.paths.bindings(name)
            bound = await self.values(path, partial(sends_to, topic))
            if is_sent or any(bound.values()):
                found.append(name)
        return found

    async def unbind_all(self, exchange: str) -> None:
        for name in await self.children(self.paths.bindings(exchange)):
            await self.delete(self.paths.binding(exchange, name))

    # -- brokers

    async def brokers_of(self, topic: str) -> set[BrokerId] | None:
        """Return the brokers that serve a topic; None if there is no such topic."""
        recorded = await self.children(self.paths.recorded_topic(topic))
        node = await self.get(self.paths.topic_definition(topic))
        found = {BrokerId(int(name)) for name in recorded if name.isdecimal()}
        if node is None:
            return found or None
        return found.union(filter(decode_definition(node.data).names, self.there))

    async def require_served(self, topic: str) -> Node | None:
        """Refuse a topic that does not exist, or that a broker does not serve.

        Returns:
            The node of its definition; None: it has none.
        """
        node = await self.get(self.paths.topic_definition(topic))
        if node and decode_definition(node.data).state is TopicState.DELETING:
            raise ConfigError(f"topic '{topic}' is being deleted")
        serving = await self.brokers_of(topic)
        if serving is None:
            raise ConfigError(f"there is no topic '{topic}'")
        if missing := sorted(self.there.keys() - serving):
            raise ConfigError(
                f"topic '{topic}' is not on all brokers: not on"
                f" {', '.join(map(str, missing))}"
            )
        return node

    async def write_with(
        self, topic: str | None, path: str, data: bytes, version: int | None
    ) -> None:
        """Write a node that routes messages to a topic, unless the topic is deleted.

        The same transaction writes the topic's definition unchanged, which increases
        its version. `delete_topic` reads the definition before it looks for bindings,
        and writes it with the version read. So of a deletion and this call at the same
        time, the second one to write is refused. A topic without a definition is
        defined in a `server.ini`, and cannot be deleted while that defines it.
        """
        while True:
            node = await self.require_served(topic) if topic is not None else None
            if topic is None or node is None:
                await self.write(path, data, version=version)
                return
            definition = self.paths.topic_definition(topic)
            kept = WriteNode(definition, node.data, node.version)
            try:
                await self.transact([WriteNode(path, data, version), kept])
            except NoNodeError:
                await self.put(path.rpartition("/")[0], b"")
            except NodeChangedError:
                if await self.get(definition) == node:
                    raise
            else:
                return

    async def require_exchanges(self) -> None:
        """Refuse, before anything is written, if a broker does not support exchanges.

        An exchange is on every broker; an older broker may have a topic of its name.
        """
        await all_of(map(self._require_on, self.there.values()))

    async def _require_on(self, address: BrokerAddress) -> None:
        try:
            capabilities = (await self._connect(address)).capabilities
        except (NoBrokerError, RequestTimeoutError):
            return  # `wait_in_effect` waits for it
        if not capabilities.exchanges:
            raise NoExchangesError(
                f"broker at {address} does not support exchanges: its version is"
                f" {capabilities.version}; nothing was changed"
            )

    async def wait_in_effect(self, exchange: str, *, is_deleted: bool = False) -> None:
        """Wait until all registered brokers that support exchanges have the change."""
        done = set[BrokerId]()
        while True:
            names = await self.children(self.paths.bindings(exchange))
            wanted = None if is_deleted else str(names_checksum(names))
            asked = {i: each for i, each in self.there.items() if i not in done}
            found = await asyncio.gather(
                *[self._is_on(each, exchange, wanted) for each in asked.values()]
            )
            done.update(i for i, is_on in zip(asked, found, strict=True) if is_on)
            waiting = sorted(self.there.keys() - done)
            if not waiting:
                return
            if self.context.clock.monotonic_s() > self.deadline_s:
                raise RequestTimeoutError(
                    f"exchange '{exchange}': brokers that do not have the change yet:"
                    f" {', '.join(map(str, waiting))}"
                )
            await asyncio.sleep(POLL_S)

    async def _is_on(
        self, address: BrokerAddress, exchange: str, wanted: str | None
    ) -> bool:
        """Return whether a broker has an exchange with a checksum; None: lacks it."""
        try:
            if not (await self._connect(address)).capabilities.exchanges:
                return True
            text = await stats_text(
                self.context, address, "exchanges", deadline_s=self._ask_until_s
            )
        except (NoBrokerError, RequestTimeoutError):
            return False  # it may have gone: it is looked up again
        found = dict(line.split(" ") for line in text.splitlines() if " " in line)
        return found.get(exchange) == wanted

    async def _connect(self, address: BrokerAddress) -> BrokerConnection:
        return await self.context.pool.get(address, deadline_s=self._ask_until_s)

    @property
    def _ask_until_s(self) -> float:
        return min(self.deadline_s, self.context.clock.monotonic_s() + ASK_S_MAX)


async def exchanges_to(
    context: ClientContext, topic: str, timeout: float | None
) -> list[str]:
    """Return the exchanges that send to a topic, or may because they are unreadable.

    Raises:
        CoordinationError: ZooKeeper cannot be asked.
    """
    return await (await _reach(context, timeout)).sending_to(topic)


async def is_exchange(context: ClientContext, name: str, timeout: float | None) -> bool:
    """Return whether there is an exchange of a name.

    Raises:
        CoordinationError: ZooKeeper cannot be asked.
    """
    _, found = await (await _reach(context, timeout)).look(name)
    return found is not None
