"""Queue group or exchange definitions, followed in ZooKeeper and copied to disk.

The copy on disk is used until ZooKeeper has been read. If a definition cannot be read,
or disappears without having been deleted, the known one stays in effect, because
ZooKeeper may have lost it. A definition with an earlier generation than the known one
proves such a loss.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from metaq.zk.definitions import encode_copy


class Definition(Protocol):
    """Decoded definition interface."""

    @property
    def is_deleted(self) -> bool:
        """Whether it records a deletion."""

    @property
    def others(self) -> Mapping[str, object]:
        """Properties that this version does not know."""


D = TypeVar("D", bound=Definition)
F = TypeVar("F")
F_co = TypeVar("F_co", covariant=True)


class DefinitionWatch(Protocol[F_co]):
    """Watch of definitions interface."""

    @property
    def is_complete(self) -> bool:
        """Whether all definitions were read."""

    @property
    def values(self) -> Mapping[str, F_co]:
        """Name → value found in ZooKeeper."""

    def cancel(self) -> None:
        """End it."""


@dataclass(slots=True, eq=False)
class FollowedDefinitions(Generic[F, D]):
    """The definitions of one kind. Owned by `Definitions`; used on the loop."""

    _kind: str
    """Name of the kind in sentences."""
    _advice: str
    """Advice about a definition that has disappeared; ends the problem's sentence."""
    path: Path
    """Path of the copy."""
    _encode: Callable[[D], bytes]
    """Encodes a definition for the copy."""
    _read_one: Callable[[F], D | str]
    """Decodes a value of the watch; returns the reason if that fails."""
    _generation_of: Callable[[D], int] = lambda _each: 0
    """Returns how many definitions of its name were deleted before it."""
    values: Mapping[str, D] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    unread: Mapping[str, str] = field(default_factory=dict)
    """Name → why it cannot be read, of definitions that were not known before."""
    lost: tuple[str, ...] = ()
    """Names of definitions whose generation ZooKeeper has lost."""
    watch: DefinitionWatch[F] | None = None

    def refresh(self) -> bool:
        """Adopt the values in ZooKeeper; return whether the copy must be written."""
        watch, before = self.watch, self.values
        if watch is not None and watch.is_complete:
            found = {name: self._read_one(each) for name, each in watch.values.items()}
            self.values = self._read(found)
        return self.values != before

    def encode(self) -> bytes:
        """Return the bytes of the copy; callable on any thread."""
        return encode_copy(self.values, self._encode)

    def active(self) -> dict[str, D]:
        """Return the definitions that are not deleted."""
        return {name: each for name, each in self.values.items() if not each.is_deleted}

    def _read(self, found: Mapping[str, D | str]) -> dict[str, D]:
        values, problems, lost = {**self.values}, list[str](), list[str]()
        unread = dict[str, str]()
        for name, each in found.items():
            if isinstance(each, str):
                is_known = name in values and not values[name].is_deleted
                effect = (
                    "the previous one stays in effect" if is_known else "it is left out"
                )
                problems.append(
                    f"definition of {self._kind} '{name}' cannot be read, and {effect}"
                    f" on this broker: {each}"
                )
                if not is_known:
                    unread[name] = f"its definition cannot be read: {each}"
            elif (old := values.get(name)) is None or not self._is_lost(old, each):
                values[name] = each
                if each.others and not each.is_deleted:
                    problems.append(
                        f"definition of {self._kind} '{name}' was made by a newer"
                        f" version, and is in effect on this broker without"
                        f" {', '.join(sorted(each.others))}"
                    )
            else:
                lost.append(name)
                problems.append(
                    f"definition of {self._kind} '{name}' is of an earlier generation"
                    " than the one in effect on this broker: ZooKeeper has lost that;"
                    " this broker writes it again"
                )
        for name in sorted(values.keys() - found.keys()):
            if values[name].is_deleted:
                del values[name]
                continue
            if self._generation_of(values[name]):
                lost.append(name)
            problems.append(
                f"definition of {self._kind} '{name}' is missing in ZooKeeper and"
                f" stays in effect on this broker: {self._advice}"
            )
        self.problems, self.lost = tuple(problems), tuple(lost)
        self.unread = unread
        return values

    def _is_lost(self, old: D, new: D) -> bool:
        earlier = self._generation_of(new) < self._generation_of(old)
        return earlier and not old.is_deleted
