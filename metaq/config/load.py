"""Read and validate a configuration file, at start and on reload.

Overrides come from the command line and take precedence over the file. A bare key sets
the first section that has such a key: `[system]`, `[zookeeper]`, `[metaq]`, then
`[replication]`. `NAME:key` sets `[topic=NAME]`, which is added if missing, so
`NAME:numPartitions` with a blank value adds a topic with all defaults.

With overrides, checksum and text are those of the settings in effect; without
overrides, those of the file, byte for byte.

An unknown section is ignored, as in MetaQ, unless its name is close to that of a known
one (docs/decisions/0020-misspelt-sections.md).

On reload only `[topic=...]` sections take effect (docs/metaq-1.4/broker.md 4.5): the
topics of the new file inherit the `[system]` settings that the broker runs with, and
all other differences are reported. A file with any error changes nothing.
"""

import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, TypeVar

from metaq.config.keys import (
    DEFINITION_KEYS,
    GROUP_PREFIX,
    LIMITS_KEYS,
    PARTITION_COUNT_MAX,
    REPLICATION_KEYS,
    SUGGESTION_CHARS_MAX,
    SYSTEM_KEYS,
    SYSTEM_KEYS_WITHOUT_EFFECT,
    TOPIC_KEYS,
    TOPIC_KEYS_WITHOUT_EFFECT,
    ZOOKEEPER_KEYS,
    Key,
    edit_distance,
    nearest_key,
)
from metaq.config.settings import (
    BrokerConfig,
    LimitsConfig,
    ReplicationConfig,
    SystemConfig,
    TopicConfig,
    ZooKeeperConfig,
    default_topic,
)
from metaq.config.text import parse_sections, write_sections
from metaq.config.topic_rules import (
    PATTERN_MARKS,
    TOPIC_NAME,
    compile_topic_pattern,
    is_pattern,
    is_safe_topic,
)
from metaq.errors import ConfigError
from metaq.model import INTERNAL_PREFIX, is_internal

Sections = dict[str, dict[str, str]]

SYSTEM: Final = "system"
ZOOKEEPER: Final = "zookeeper"
LIMITS: Final = "metaq"
REPLICATION: Final = "replication"
TOPIC_PREFIX: Final = "topic="
TOPIC: Final = TOPIC_PREFIX.removesuffix("=")
NEAR_EDITS_MAX: Final = 2
"""Maximum edit distance at which an unknown section counts as misspelt: two wrong,
missing or additional letters, or two that are swapped."""
FOREIGN_SECTIONS: Final = frozenset({"slave"})
"""Sections of older MetaQ files, ignored by all brokers."""
VALUE_CHARS_MAX: Final = 4096
"""Maximum length of a value; longer than any path or ZooKeeper ensemble."""
NO_OVERRIDES: Final[Mapping[str, str]] = MappingProxyType({})

_KEYS_BY_SECTION: Final = {
    SYSTEM: SYSTEM_KEYS,
    ZOOKEEPER: ZOOKEEPER_KEYS,
    LIMITS: LIMITS_KEYS,
    REPLICATION: REPLICATION_KEYS,
}
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")

SET_SESSION_TIMEOUT_MS: Final = 6_000
"""Default of zk.zkSessionTimeoutMs in a replica set: time from the loss of a leader to
the election of another."""

Settings = TypeVar(
    "Settings",
    SystemConfig,
    ZooKeeperConfig,
    LimitsConfig,
    ReplicationConfig,
    TopicConfig,
)


def load_config(
    path: str, read: Callable[[str], bytes], overrides: Mapping[str, str] = NO_OVERRIDES
) -> BrokerConfig:
    """Read and validate a configuration file.

    Args:
        path: path of the file.
        read: returns the bytes of a file; its exceptions are passed on.
        overrides: key → value, see the head of this file.

    Raises:
        ConfigError: the file or an override is invalid; the message names file,
            section, key and value.
    """
    return parse_config(read(path), path, overrides)


def parse_config(
    data: bytes, path: str, overrides: Mapping[str, str] = NO_OVERRIDES
) -> BrokerConfig:
    """Validate the bytes of a configuration file.

    Args:
        data: content of the file; without overrides the result keeps it, for
            `stats config`.
        path: path of the file, for messages; `<its directory>/../provided` is the
            default of `appClassPath`.
        overrides: key → value, see the head of this file.

    Raises:
        ConfigError: as `load_config`; any other exception is a bug.
    """
    sections = parse_sections(data, path)
    shadowed = _apply_overrides(sections, overrides, path)
    if overrides:
        data = write_sections(sections)
    config = _build(sections, data, path, system=None)
    return replace(
        config, overrides=MappingProxyType(dict(overrides)), shadowed=shadowed
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reload:
    """The outcome of a reload."""

    config: BrokerConfig
    """Settings after the reload: topics and file are new, the rest is unchanged."""
    added: tuple[str, ...]
    """Topics only in the new settings, sorted."""
    removed: tuple[str, ...]
    """Topics only in the old settings, sorted; they stay accepted and registered until
    a restart."""
    changed: tuple[str, ...]
    needs_restart: tuple[str, ...]
    """Differences that take a restart, as `[section] key: old -> new`."""


def reload_config(
    running: BrokerConfig, data: bytes, overrides: Mapping[str, str] = NO_OVERRIDES
) -> Reload:
    """Merge a changed file into the settings of a running broker.

    Args:
        running: the settings in effect; not changed.
        data: the new bytes of the same file.
        overrides: overrides with which the broker was started.

    Raises:
        ConfigError: as `parse_config`; the caller keeps `running`.
    """
    sections = parse_sections(data, running.path)
    shadowed = _apply_overrides(sections, overrides, running.path)
    if overrides:
        data = write_sections(sections)
    wanted = _build(sections, data, running.path, system=None)
    merged = replace(
        _build(sections, data, running.path, system=running.system),
        zookeeper=running.zookeeper,
        limits=running.limits,
        replication=running.replication,
        overrides=running.overrides,
        shadowed=shadowed,
        defined=running.defined,
    )
    old, new = running.topics, merged.topics
    both = old.keys() & new.keys()
    return Reload(
        config=merged,
        added=tuple(sorted(new.keys() - both)),
        removed=tuple(sorted(old.keys() - both)),
        changed=tuple(sorted(name for name in both if old[name] != new[name])),
        needs_restart=(
            *_differences(running, wanted),
            *_topic_differences(running, merged),
        ),
    )


def define_topic(
    name: str,
    partition_count: int,
    settings: Mapping[str, str],
    *,
    system: SystemConfig,
) -> TopicConfig:
    """Validate a topic that was created by command, like a section of the file.

    Args:
        name: topic name; patterns are refused.
        partition_count: number of partitions on each broker.
        settings: names of `DEFINITION_KEYS` → text of the value.
        system: defaults of the broker.

    Raises:
        ConfigError: a name or value is invalid; the message names topic, key and
            value.
    """
    where = f"topic '{name}'"
    if not is_safe_topic(name):
        raise ConfigError(f"{where}: expected {TOPIC_NAME}")
    _require_unreserved(name, where)
    if is_pattern(name):
        raise ConfigError(
            f"{where}: expected a name, got a pattern: none of {PATTERN_MARKS}"
        )
    if not 1 <= partition_count <= PARTITION_COUNT_MAX:
        raise ConfigError(
            f"{where}: expected 1..{PARTITION_COUNT_MAX} partitions,"
            f" got {partition_count}"
        )
    base = replace(default_topic(name, system), partition_count=partition_count)
    return _fill(base, DEFINITION_KEYS, settings, where)


def _differences(running: BrokerConfig, wanted: BrokerConfig) -> tuple[str, ...]:
    alone = ReplicationConfig()
    pairs = (
        (SYSTEM, running.system, wanted.system),
        (ZOOKEEPER, running.zookeeper, wanted.zookeeper),
        (LIMITS, running.limits, wanted.limits),
        (REPLICATION, running.replication or alone, wanted.replication or alone),
    )
    return tuple(
        f"[{section}] {key.name}: {old} -> {new}"
        for section, before, after in pairs
        for key in _KEYS_BY_SECTION[section]
        if (old := getattr(before, key.field)) != (new := getattr(after, key.field))
    )


def _topic_differences(running: BrokerConfig, merged: BrokerConfig) -> Iterator[str]:
    """Yield changes of topics that do not take effect on open logs."""
    for name, after in merged.topics.items():
        before = running.topics.get(name, after)
        for key in TOPIC_KEYS:
            old, new = getattr(before, key.field), getattr(after, key.field)
            if old != new and not key.is_reloadable:
                yield f"[{TOPIC_PREFIX}{name}] {key.name}: {old} -> {new}"


def _apply_overrides(
    sections: Sections, overrides: Mapping[str, str], path: str
) -> tuple[str, ...]:
    """Set the overrides in the sections of the file.

    Returns:
        A sentence for each override that a topic's own section overrules.
    """
    for name, value in overrides.items():
        topic, colon, key = name.rpartition(":")
        section = TOPIC_PREFIX + topic if colon else _section_of(key, path)
        sections.setdefault(section, {})[key] = value.strip()
    return tuple(
        f"{key}={value} was set for the broker, but [{section}] says {key}={own[key]}"
        for key, value in overrides.items()
        for section, own in sections.items()
        if section.startswith(TOPIC_PREFIX) and own.get(key, value) not in {"", value}
    )


def _section_of(key: str, path: str) -> str:
    for section, keys in _KEYS_BY_SECTION.items():
        if any(known.name == key for known in keys):
            return section
    everything = (known for keys in _KEYS_BY_SECTION.values() for known in keys)
    raise _unknown_key(key, everything, f"{path}: override")


def _build(
    sections: Sections, data: bytes, path: str, *, system: SystemConfig | None
) -> BrokerConfig:
    """Validate all sections; topics inherit from `system`, if None from the file's."""
    own_system = _build_system(sections, path)
    zookeeper = _build_zookeeper(sections, path)
    limits = _build_limits(sections, path)
    replication = _build_replication(sections, path)
    has_own = sections.get(ZOOKEEPER, {}).get("zk.zkSessionTimeoutMs")
    if replication is not None and not has_own:
        zookeeper = replace(zookeeper, session_timeout_ms=SET_SESSION_TIMEOUT_MS)
    topics = {}
    ignored = []
    for section, raw in sections.items():
        if section.startswith(TOPIC_PREFIX):
            name = section.removeprefix(TOPIC_PREFIX).strip()
            where = f"{path}: [{section}]"
            if name in topics:
                raise ConfigError(f"{where}: topic '{name}' occurs twice")
            topics[name] = _build_topic(name, raw, system or own_system, where)
        elif section not in _KEYS_BY_SECTION:
            _check_foreign(section, path)
            ignored.append(section)
    if replication is not None:
        _check_set([system or own_system, *topics.values()], zookeeper, path)
    if not topics:
        raise ConfigError(f"{path}: Empty topics list, expected a section [topic=NAME]")
    return BrokerConfig(
        path=path,
        data=data,
        checksum=zlib.crc32(data),
        system=system or own_system,
        zookeeper=zookeeper,
        limits=limits,
        replication=replication,
        topics=MappingProxyType(topics),
        ignored_sections=tuple(ignored),
    )


def _check_foreign(section: str, path: str) -> None:
    """Check that an unknown section is not a misspelt known one.

    Raises:
        ConfigError: its name is close to a known one; the message names both.
    """
    if section in FOREIGN_SECTIONS:
        return
    kind, equals, name = section.partition("=")
    first, *rest = re.split(r"[:\s]+", section.strip(), maxsplit=1)
    if rest and first.casefold() == TOPIC:
        kind, equals, name = TOPIC, "=", rest[0].removeprefix("=")
    kind = kind.strip().casefold()
    nearest = nearest_key(kind, (*_KEYS_BY_SECTION, TOPIC))
    if edit_distance(kind[:SUGGESTION_CHARS_MAX], nearest) > NEAR_EDITS_MAX:
        return
    if nearest == TOPIC:
        nearest = TOPIC_PREFIX + (name.strip() if equals else "NAME")
    shown = section[:SUGGESTION_CHARS_MAX]
    raise ConfigError(
        f"{path}: Invalid config section:[{shown}],do you mean '[{nearest}]'?"
    )


def _build_system(sections: Sections, path: str) -> SystemConfig:
    if SYSTEM not in sections:
        raise ConfigError(f"{path}: section [{SYSTEM}] is missing")
    where = f"{path}: [{SYSTEM}]"
    # By default, filter classes are in `provided`, a sibling of the file's directory.
    directory, slash, _name = path.rpartition("/")
    base = SystemConfig(app_class_path=f"{directory}{slash}../provided")
    raw = sections[SYSTEM]
    config = _fill(base, SYSTEM_KEYS, raw, where, SYSTEM_KEYS_WITHOUT_EFFECT)
    if raw.get("dataLogPath"):
        return config
    return replace(config, data_log_path=config.data_path)


def _build_zookeeper(sections: Sections, path: str) -> ZooKeeperConfig:
    raw = sections.get(ZOOKEEPER, {})
    where = f"{path}: [{ZOOKEEPER}]"
    tolerated = {key.name for key in SYSTEM_KEYS} | SYSTEM_KEYS_WITHOUT_EFFECT
    config = _fill(ZooKeeperConfig(), ZOOKEEPER_KEYS, raw, where, tolerated)
    if not any(key.name in raw for key in ZOOKEEPER_KEYS):
        raise ConfigError(
            f"{where}: Null zookeeper config, expected zk.zkConnect, "
            "or zk.zkEnable=false"
        )
    if config.is_enabled and not raw.get("zk.zkConnect", config.connect):
        raise ConfigError(f"{where}: Empty zookeeper servers, zk.zkConnect is blank")
    return config


def _build_limits(sections: Sections, path: str) -> LimitsConfig:
    raw = sections.get(LIMITS, {})
    where = f"{path}: [{LIMITS}]"
    limits = _fill(LimitsConfig(), LIMITS_KEYS, raw, where)
    # Reading pauses at this bound, so a larger command would never be read.
    needed = max(
        limits.payload_bytes_max,
        limits.batch_bytes_max,
        limits.connection_in_flight_bytes_max,
    )
    if limits.in_flight_bytes_max < needed:
        raise ConfigError(
            f"{where} inFlightBytesMax: expected at least {needed}, the largest of"
            " payloadBytesMax, batchBytesMax and connectionInFlightBytesMax, got"
            f" {limits.in_flight_bytes_max}"
        )
    return limits


def _build_replication(sections: Sections, path: str) -> ReplicationConfig | None:
    if REPLICATION not in sections:
        return None
    where = f"{path}: [{REPLICATION}]"
    return _fill(ReplicationConfig(), REPLICATION_KEYS, sections[REPLICATION], where)


def _check_set(
    settings: Iterable[SystemConfig | TopicConfig],
    zookeeper: ZooKeeperConfig,
    path: str,
) -> None:
    """Check that a replica set has ZooKeeper, and syncs puts before it acknowledges.

    Raises:
        ConfigError: ZooKeeper is disabled, or a topic syncs by threshold.
    """
    where = f"{path}: [{REPLICATION}] needs"
    if not zookeeper.is_enabled:
        raise ConfigError(f"{where} zk.zkEnable=true, got false")
    threshold = max(each.unflush_threshold for each in settings)
    if threshold > 0:
        raise ConfigError(
            f"{where} unflushThreshold=0 or less, got {threshold}: replicas"
            " acknowledge what is synced"
        )


def _require_unreserved(name: str, where: str) -> None:
    if is_internal(name):
        raise ConfigError(
            f"{where}: names that begin with {INTERNAL_PREFIX} are reserved for brokers"
        )


def _build_topic(
    name: str, raw: dict[str, str], system: SystemConfig, where: str
) -> TopicConfig:
    if not is_safe_topic(name):
        raise ConfigError(f"{where}: '{name}' cannot be a topic name")
    _require_unreserved(name, where)
    try:
        compile_topic_pattern(name)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    groups = {
        key.removeprefix(GROUP_PREFIX): value
        for key, value in raw.items()
        if key.startswith(GROUP_PREFIX) and key != GROUP_PREFIX
    }
    filters = {group: value for group, value in groups.items() if value}
    tolerated = {GROUP_PREFIX + group for group in groups} | TOPIC_KEYS_WITHOUT_EFFECT
    config = _fill(default_topic(name, system), TOPIC_KEYS, raw, where, tolerated)
    return replace(config, filters=MappingProxyType(filters))


def _fill(
    base: Settings,
    keys: tuple[Key, ...],
    raw: Mapping[str, str],
    where: str,
    tolerated: frozenset[str] | set[str] = frozenset(),
) -> Settings:
    """Return `base` with the values of a section; a blank value means the default."""
    known = {key.name for key in keys}
    for name, text in raw.items():
        if name not in known and name not in tolerated:
            raise _unknown_key(name, keys, where)
        if len(text) > VALUE_CHARS_MAX or _CONTROL.search(text):
            raise ConfigError(
                f"{where} {name}: expected at most {VALUE_CHARS_MAX} printable "
                f"characters, got {len(text)} characters"
            )
    values: dict[str, object] = {}
    for key in keys:
        text = raw.get(key.name, "")
        if text:
            try:
                values[key.field] = key.read(text)
            except ValueError as error:
                raise ConfigError(f"{where} {key.name}={text}: {error}") from error
        elif key.is_required:
            raise ConfigError(f"{where}: Blank value for {key.name}")
    return replace(base, **values)  # type: ignore[arg-type]  # each row reads its field


def _unknown_key(name: str, keys: Iterable[Key], where: str) -> ConfigError:
    nearest = nearest_key(name, (key.name for key in keys))
    shown = name[:SUGGESTION_CHARS_MAX]
    return ConfigError(f"{where}: Invalid config key:{shown},do you mean '{nearest}'?")
