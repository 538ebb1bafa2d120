"""Definitions of one kind, beside those of topics: from ZooKeeper, with a copy.

While ZooKeeper has not been read the copy on the disk counts. A definition that cannot
be read stays as it was, and so does one that is gone without having been deleted:
ZooKeeper may have lost it. It has, where one of an earlier generation is there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from metaq.zk.definitions import encode_copy


class Definition(Protocol):
    """Value that a definition is read as."""

    @property
    def is_deleted(self) -> bool:
        """Whether it is over."""

    @property
    def others(self) -> Mapping[str, object]:
        """Properties that are not known here."""


D = TypeVar("D", bound=Definition)
F = TypeVar("F")
F_co = TypeVar("F_co", covariant=True)


class DefinitionWatch(Protocol[F_co]):
    """Watch of definitions interface."""

    @property
    def is_complete(self) -> bool:
        """Whether every one was read."""

    @property
    def values(self) -> Mapping[str, F_co]:
        """Name → what was found."""

    def cancel(self) -> None:
        """End it."""


@dataclass(slots=True, eq=False)
class FollowedDefinitions(Generic[F, D]):
    """The definitions of one kind. Owner: `Definitions`, on the loop."""

    _kind: str
    """Their name in sentences."""
    _advice: str
    """For one that is gone, after "on this broker: "."""
    path: Path
    """Of the copy."""
    _encode: Callable[[D], bytes]
    """Writes one for the copy."""
    _read_one: Callable[[F], D | str]
    """Returns the definition in what the watch finds, or why it has none."""
    _generation_of: Callable[[D], int] = lambda _each: 0
    """Returns how many of its name were deleted before."""
    values: Mapping[str, D] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    unread: Mapping[str, str] = field(default_factory=dict)
    """Why those cannot be read that were not known before, by name."""
    lost: tuple[str, ...] = ()
    """Names of those whose generation ZooKeeper has lost."""
    watch: DefinitionWatch[F] | None = None

    def refresh(self) -> bool:
        """Take over what ZooKeeper has; return whether the copy is to be written."""
        watch, before = self.watch, self.values
        if watch is not None and watch.is_complete:
            found = {name: self._read_one(each) for name, each in watch.values.items()}
            self.values = self._read(found)
        return self.values != before

    def encode(self) -> bytes:
        """Return the bytes of the copy; in any thread."""
        return encode_copy(self.values, self._encode)

    def active(self) -> dict[str, D]:
        """Return those that are not deleted."""
        return {name: each for name, each in self.values.items() if not each.is_deleted}

    def _read(self, found: Mapping[str, D | str]) -> dict[str, D]:
        values, problems, lost = {**self.values}, list[str](), list[str]()
        unread = dict[str, str]()
        for name, each in found.items():
            if isinstance(each, str):
                is_known = name in values and not values[name].is_deleted
                effect = "what it was stays in effect" if is_known else "it is left out"
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
                f"definition of {self._kind} '{name}' is gone from ZooKeeper, and stays"
                f" in effect on this broker: {self._advice}"
            )
        self.problems, self.lost = tuple(problems), tuple(lost)
        self.unread = unread
        return values

    def _is_lost(self, old: D, new: D) -> bool:
        earlier = self._generation_of(new) < self._generation_of(old)
        return earlier and not old.is_deleted
