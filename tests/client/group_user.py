"""A user's process in a random walk: it calls its consumers in all possible ways."""

import asyncio
import contextlib
import datetime as dt
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

from metaq.client import AsyncConsumer
from metaq.errors import ClientError, MetaqError, OwnershipLostError
from metaq.model import Message, Offset, TopicPartition
from metaq.testing.zk import MemoryCoordinator
from tests.client.group_members import CLOCK
from tests.client.group_model import LATE_S, REQUEST_S, STEP, Claim, Process, Reader

if TYPE_CHECKING:
    from tests.client.group_walk import Walk

OPTIONS: dict[str, Any] = {
    "request_timeout_s": REQUEST_S,
    "session_timeout_s": 5.0,
    "reconnect_first_s": 0.02,
    "reconnect_max_s": 0.5,
}
RECENT_MAX = 30


class HookError(Exception):
    """Raised by a hook on purpose."""


class User:
    """One process: a client, and one consumer after the other."""

    def __init__(self, walk: "Walk", process: Process, rng: random.Random) -> None:
        self.walk = walk
        self.model = walk.model
        self.process = process
        self.rng = rng
        self.coordinator: MemoryCoordinator | None = None
        self.client = walk.make_client(self)
        self.consumer: AsyncConsumer
        self.reader: Reader
        self.is_leaving = self.is_ending = False
        self.recent: deque[Message] = deque(maxlen=RECENT_MAX)
        self.hook_kinds: dict[str, str] = {}
        self.consumer_count = 0
        self._task: asyncio.Task[None] | None = None
        self._nowaits: set[asyncio.Future[None]] = set()

    # -- life -------------------------------------------------------------------------

    def begin(self) -> None:
        self._task = self.walk.spawn(self._live())

    def die(self) -> None:
        """Nothing of it is heard any more."""
        if hasattr(self, "reader"):
            self.reader.is_dead = True
        if self._task is not None:
            self._task.cancel()

    async def _live(self) -> None:
        await self.client.start()
        while not self.is_ending:
            self.is_leaving = False
            self._make()
            try:
                await self.consumer.start()
            except MetaqError as error:
                self.model.note(f"{self.reader.name} did not start: {error!r}")
                await asyncio.sleep(0.5)
                continue
            if await self._work():
                await self._close()
        assert self.coordinator is not None
        session_id = self.coordinator.status.session_id
        with contextlib.suppress(MetaqError):
            await self.client.close()
        if self.coordinator.status.session_id == session_id:
            # It could not be ended; ZooKeeper ends it in its time.
            await asyncio.sleep(OPTIONS["session_timeout_s"])
        self.walk.server.reap(session_id)

    def _make(self) -> None:
        rng = self.rng
        kinds = {
            "on_assigned": ["seek", "commit", "names", "slow", "raise", "nothing"],
            "on_revoked": ["commit", "names", "slow", "raise", "nothing"],
            "on_lost": ["commit", "raise", "nothing"],
        }
        chosen = {}
        if rng.random() < 0.5:
            chosen = {n: rng.choice(k) for n, k in kinds.items() if rng.random() < 0.6}
        self.hook_kinds = chosen
        self.consumer_count += 1
        interval_s = rng.choice([None, None, 0.2, 1.0, 5.0])
        revoke_s = rng.choice([0.0, 0.3, 2.0])
        self.reader = Reader(
            f"{self.process.name}x{self.consumer_count}",
            self.process,
            is_manual=interval_s is None,
            skips_repeats=rng.random() < 0.6,
            has_hooks="on_assigned" in chosen,
            is_sloppy="on_revoked" in chosen,
        )
        self.consumer = self.walk.make_consumer(
            self,
            self.reader,
            commit_interval_s=interval_s,
            skip_repeats=self.reader.skips_repeats,
            revoke_timeout_s=revoke_s,
            buffer_count_max=rng.choice([1, 5, 50, 100_000]),
            idle_step_s=0.1,
            idle_max_s=1.0,
            **{name: self._hook(name, kind) for name, kind in chosen.items()},
        )
        self.recent.clear()

    async def _work(self) -> bool:
        """Call the consumer at random; return False when it has failed."""
        actions: dict[Callable[[], Awaitable[None]], int] = {
            self.receive: 6, self.receive_many: 6, self.fill: 6, self.iterate: 6,
            self.batches: 6, self.commit: 5, self.commit_messages: 5,
            self.commit_offsets: 2, self.commit_nowait: 4, self.seek: 3, self.pause: 3,
            self.resume: 4, self.rollback: 2, self.committed: 1, self.idle: 3,
        }  # fmt: skip
        names, weights = list(actions), list(actions.values())
        while not self.is_leaving:
            (action,) = self.rng.choices(names, weights)
            try:
                await action()
            except MetaqError as error:
                is_due = "raise" in self.hook_kinds.values() and "raised" in str(error)
                if not is_due:
                    text = f"{self.reader.name}: {action.__name__} failed: {error!r}"
                    self.model.fail(text)
                await self._close()
                return False
            self.walk.steps_done += 1
            self._check_paused()
            await asyncio.sleep(self.rng.choice([0.0, 0.0, 0.05, 0.3]))
        return True

    async def _close(self) -> None:
        is_clean = self.rng.random() < 0.5
        timeout = self.rng.choice([None, None, 1.0])
        self.model.note(f"{self.reader.name} closes, clean {is_clean}, {timeout}")
        if is_clean:
            self._request()
            self.consumer.current_batch.count()
        if timeout is not None:
            self.reader.is_sloppy = True
        with contextlib.suppress(ClientError):
            await self.consumer.close(timeout)

    async def read_all(self) -> None:
        """Read to the end of every log, as the only member."""
        await self.client.start()
        self.reader = Reader(
            "last", self.process, is_manual=False, skips_repeats=True, has_hooks=False
        )
        self.consumer = self.walk.make_consumer(
            self, self.reader, commit_interval_s=1.0, idle_step_s=0.1, idle_max_s=1.0
        )
        ends = self.model.ends
        async with self.consumer:
            while True:
                claims = {one: self._claim(one) for one in ends}
                done = [one for one, c in claims.items() if c and c.next >= ends[one]]
                if len(done) == len(ends):
                    break
                self._request()
                self._hand_out(await self.consumer.receive_many(50, 1.0))
                self.model.check()
            self._request()
        await self.client.close()

    # -- reading ----------------------------------------------------------------------

    def _claim(self, one: TopicPartition) -> Claim | None:
        return self.model.claim_of(self.reader, one)

    def _request(self, *, is_sure: bool = True) -> None:
        buffers = self.consumer.fetch_buffer.handled()
        self.model.request(self.reader, buffers, is_sure=is_sure)

    def _hand_out(self, messages: Iterable[Message]) -> None:
        many = list(messages)
        self.model.hand_out(self.reader, many)
        self.recent.extend(many)

    def _seconds(self) -> float:
        return self.rng.choice([0.0, 0.05, 0.5, 3.0])

    async def receive(self) -> None:
        self._request()
        message = await self.consumer.receive(self._seconds())
        self._hand_out([] if message is None else [message])

    async def receive_many(self) -> None:
        self._request()
        count = self.rng.choice([1, 2, 5, 50])
        self._hand_out(await self.consumer.receive_many(count, self._seconds()))

    async def fill(self) -> None:
        """A list over partitions; sometimes nobody waits for its end."""
        self._request()
        count, is_cancelled = self.rng.choice([1, 3, 10, 50]), self.rng.random() < 0.3
        wait_s = self._seconds()
        found: list[Message] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s if is_cancelled else None):
                found = await self.consumer.receive_many(
                    count, None if is_cancelled else wait_s, fill=True
                )
        if len(found) > count:
            self.model.fail(f"{len(found)} messages for {count}")
        self._hand_out(found)

    async def iterate(self) -> None:
        """Some steps of a loop that is left, or given up."""
        steps = aiter(self.consumer)
        try:
            async with asyncio.timeout(self._seconds()):
                for _ in range(self.rng.choice([1, 2, 4, 30])):
                    self._request()
                    self._hand_out([await anext(steps)])
        except TimeoutError:
            pass
        finally:
            await steps.aclose()  # type: ignore[attr-defined]

    async def batches(self) -> None:
        steps = self.consumer.batches(
            max_count=self.rng.choice([1, 3, 10, 100]),
            max_bytes=self.rng.choice([None, STEP, 5 * STEP]),
            max_wait_s=self.rng.choice([0.0, 0.1, 1.0]),
        )
        try:
            async with asyncio.timeout(self._seconds()):
                for _ in range(self.rng.choice([1, 2, 4])):
                    # Who gives up at once has requested nothing.
                    self._request(is_sure=False)
                    batch = await anext(steps)
                    self._hand_out(batch)
                    self._check_batch(batch)
                    if self.rng.random() < 0.5:
                        await self._commit_all(batch.commit)
                    if self.rng.random() < 0.2:
                        await self._commit_named(batch, batch.offsets)
        except TimeoutError:
            pass
        finally:
            await steps.aclose()  # type: ignore[attr-defined]

    def _check_batch(self, batch: Any) -> None:
        begins: dict[TopicPartition, Offset] = {}
        for message in batch:
            begins.setdefault(message.partition, message.offset)
            if batch.offsets[message.partition] < message.next_offset:
                self.model.fail(f"{batch} ends before {message}")
        if begins != batch.begins or not begins:
            self.model.fail(f"{batch} begins at {batch.begins}, not {begins}")

    async def idle(self) -> None:
        await asyncio.sleep(self._seconds())

    # -- commits ----------------------------------------------------------------------

    async def commit(self) -> None:
        await self._commit_all(self.consumer.commit)

    async def _commit_all(self, commit: Callable[..., Awaitable[None]]) -> None:
        self._request()
        await self._commit_handled(commit)

    async def _commit_handled(self, commit: Callable[..., Awaitable[None]]) -> None:
        claims = [(one, self._claim(one)) for one in sorted(self.consumer.assignment())]
        sure = [(one, claim, claim.sure) for one, claim in claims if claim is not None]
        if not await self._has_written(commit):
            return
        for one, claim, number in sure:
            if claim is self._claim(one) and not claim.backs:
                stored = self.model.stored[one] or 0
                if stored < min(number, claim.sure):
                    text = f"{one}: commit of {number} returned, {stored} is stored"
                    self.model.fail(text)

    async def _has_written(self, commit: Callable[..., Awaitable[None]]) -> bool:
        """Call a commit; return whether it says that all is written."""
        timeout = self.rng.choice([None, None, None, 0.5])
        reader = self.reader
        reader.commits += 1
        reader.commit_calls += 1
        try:
            await commit(timeout=timeout)
        except OwnershipLostError:
            return False
        except BaseException as error:
            reader.commits_until_s = CLOCK.monotonic_s() + LATE_S
            if not isinstance(error, MetaqError):
                raise
            return False
        finally:
            reader.commits -= 1
        # A hook may end when there is another consumer.
        return reader is self.reader

    def _some_messages(self) -> Any:
        many = list(self.recent)
        if self.rng.random() < 0.5:
            return self.rng.choice(many)
        return self.rng.sample(many, self.rng.randint(1, len(many)))

    async def commit_messages(self) -> None:
        """Messages handed out before, be they committed or lost."""
        if self.recent:
            what = self._some_messages()
            await self._commit_named(what, self._ends_of(what))

    def _ends_of(self, what: Any) -> dict[TopicPartition, Offset]:
        ends: dict[TopicPartition, Offset] = {}
        for one in [what] if isinstance(what, Message) else what:
            ends[one.partition] = max(one.next_offset, ends.get(one.partition, 0))
        return ends

    async def _commit_named(
        self,
        what: Any,
        offsets: Any,
        *,
        may_go_back: bool = False,
    ) -> None:
        claims = {one: self._claim(one) for one in offsets}
        before = {one: len(c.written) for one, c in claims.items() if c is not None}
        calls = self.reader.commit_calls + 1
        self.model.names(self.reader, dict(offsets), may_go_back=may_go_back)
        self.model.note(f"{self.reader.name} names {offsets}, back {may_go_back}")

        async def commit(timeout: float | None) -> None:
            await self.consumer.commit(what, timeout)

        if not await self._has_written(commit):
            return
        for one, claim in claims.items():
            if claim is not self._claim(one):
                continue
            number, stored = offsets[one] // STEP, self.model.stored[one] or 0
            text = f"{one}: commit of {number} returned, {stored} is stored"
            if claim is None:
                # What is committed already is no error.
                if stored != number and (may_go_back or stored < number):
                    self.model.fail(f"{text}, by {self.reader.name}, no owner")
            elif may_go_back:
                written = claim.written[before[one] :]
                # A later commit may have taken its place.
                is_last = calls == self.reader.commit_calls and not self._nowaits
                if is_last and number not in (stored, *written):
                    self.model.fail(text)
            elif stored < number and not claim.backs and not claim.moves:
                self.model.fail(text)

    def _some_offsets(self) -> dict[TopicPartition, Offset]:
        ones = sorted(self.consumer.assignment())
        chosen = self.rng.sample(ones, self.rng.randint(0, len(ones)))
        ends = self.model.ends
        return {one: Offset(self.rng.randint(0, ends[one]) * STEP) for one in chosen}

    async def commit_offsets(self) -> None:
        """Offsets of partitions, back or over messages that nobody has seen."""
        offsets = self._some_offsets()
        await self._commit_named(offsets, offsets, may_go_back=True)

    async def commit_nowait(self) -> None:
        kind, what = self.rng.choice(["all", "all", "messages", "offsets"]), None
        if kind == "all":
            self._request()
        elif kind == "messages" and self.recent:
            what = self._some_messages()
            self.model.names(self.reader, self._ends_of(what), may_go_back=False)
        else:
            what = self._some_offsets()
            self.model.names(self.reader, what, may_go_back=True)
        self.model.note(f"{self.reader.name} commit_nowait {kind}")
        reader = self.reader
        reader.commits += 1
        reader.commit_calls += 1
        future = self.consumer.commit_nowait(what)
        self._nowaits.add(future)

        def end(done: asyncio.Future[None]) -> None:
            reader.commits -= 1
            self._nowaits.discard(done)
            if not done.cancelled() and done.exception() is not None:
                reader.commits_until_s = CLOCK.monotonic_s() + LATE_S

        future.add_done_callback(end)

    async def committed(self) -> None:
        before = dict(self.model.stored)
        writes = {one: len(each) for one, each in self.model.writes.items()}
        try:
            found = await self.consumer.committed()
        except MetaqError:
            return
        for one, offset in found.items():
            number = None if offset is None else offset // STEP
            now = self.model.stored[one]
            fresh = self.model.writes[one][writes.get(one, 0) :]
            if number not in (before[one], *fresh):
                self.model.fail(f"{one}: committed() is {number}, not {now}")

    # -- going elsewhere --------------------------------------------------------------

    async def seek(self) -> None:
        ones = sorted(self.consumer.assignment())
        if ones:
            await self._seek(self.rng.choice(ones))

    async def _seek(self, one: TopicPartition) -> None:
        rng, end = self.rng, self.model.ends[one]
        number = rng.randint(0, end)
        at_s = rng.uniform(1000.0, CLOCK.monotonic_s())
        moment = dt.datetime.fromtimestamp(int(at_s * 1000) / 1000, dt.UTC)
        wanted_at = self.walk.broker.number_at(one, moment.timestamp())
        goal: Any
        goal, low, high = rng.choice(
            [
                (Offset(number * STEP), number, number),
                ("earliest", 0, 0),
                ("latest", end, None),
                (moment, wanted_at, wanted_at),
                (Offset(number * STEP + 5), -1, -1),
            ]
        )
        try:
            await self.consumer.seek(one, goal, rng.choice([None, 0.5]))
        except MetaqError as error:
            self.model.note(f"{self.reader.name} stays in {one}: {error!r}")
            return
        at = self.consumer.fetch_buffer.handled()[one].offset // STEP
        high = self.model.ends[one] if high is None else high
        if not low <= at <= high:
            self.model.fail(f"{one}: seek to {goal} is at {at}, not {low} to {high}")
        self.model.moved(self.reader, one, at, is_seek=True)

    async def rollback(self) -> None:
        before = {one: self.model.stored[one] or 0 for one in self.model.ends}
        writes = {one: len(each) for one, each in self.model.writes.items()}
        begins = {one: self._begin_of(one) for one in self.consumer.assignment()}
        try:
            await self.consumer.rollback(self.rng.choice([None, 0.5]))
        except MetaqError as error:
            self.model.note(f"{self.reader.name} not rolled back: {error!r}")
            return
        handled, process = self.consumer.fetch_buffer.handled(), self.reader.process
        for one in sorted(begins.keys() & self.consumer.assignment()):
            at = handled[one].offset // STEP
            claim, _count = begin = self._begin_of(one)
            last = 0 if claim is None else max(claim.handled, process.end(one))
            if begin != begins[one] and claim and claim.handled <= at <= last:
                # It went, and came again, and what is handled here is left out; or a
                # hook sought another place.
                continue
            fresh = self.model.writes[one][writes.get(one, 0) :]
            now = self.model.stored[one] or 0
            if at not in (before[one], now, *fresh):
                self.model.fail(f"{one}: rolled back to {at}, committed is {now}")
            self.model.moved(self.reader, one, at, is_seek=False)

    def _begin_of(self, one: TopicPartition) -> tuple[Claim | None, int]:
        claim = self._claim(one)
        return claim, 0 if claim is None else claim.begin_count

    async def pause(self) -> None:
        chosen = [p for p in sorted(self.consumer.assignment()) if self._toss()]
        self.consumer.pause(chosen)
        owned = [one for one in chosen if self._claim(one) is not None]
        self.reader.paused.update(owned)

    async def resume(self) -> None:
        chosen = [one for one in sorted(self.consumer.assignment()) if self._toss()]
        self.consumer.resume(chosen)
        self.reader.paused.difference_update(chosen)

    def _toss(self) -> bool:
        return self.rng.random() < 0.5

    def _check_paused(self) -> None:
        paused, ours = self.consumer.paused(), self.consumer.assignment()
        for one in ours:
            if self._claim(one) and (one in paused) != (one in self.reader.paused):
                self.model.fail(f"{one}: paused() of {self.reader.name} is {paused}")

    # -- hooks ------------------------------------------------------------------------

    def _hook(self, name: str, kind: str) -> Any:
        reader = self.reader

        async def hook(
            _consumer: AsyncConsumer, partitions: frozenset[TopicPartition]
        ) -> None:
            if reader.is_dead or reader is not self.reader:
                return
            self.model.note(f"{reader.name} {name} {kind} {sorted(partitions)}")
            if name == "on_lost":
                await self._try_to_commit(reader)
            if kind == "raise" and self.rng.random() < 0.3:
                raise HookError(name)
            if kind == "slow":
                await asyncio.sleep(self.rng.choice([0.0, 0.2, 2.0]))
            if name == "on_lost":
                return
            if kind == "commit":
                await self._commit_handled(self.consumer.commit)
            elif kind == "names":
                ends = self.model.ends
                offsets = {
                    one: Offset(self.rng.randint(0, ends[one]) * STEP)
                    for one in sorted(partitions)
                }
                await self._commit_named(offsets, offsets, may_go_back=True)
            elif kind == "seek":
                for one in sorted(partitions):
                    if self._toss():
                        await self._seek(one)
            if name == "on_assigned":
                reader.ready.update(partitions)

        return hook

    async def _try_to_commit(self, reader: Reader) -> None:
        try:
            await self.consumer.commit()
        except OwnershipLostError:
            return
        self.model.fail(f"{reader.name} could commit in on_lost")
