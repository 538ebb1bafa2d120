"""Lives full of faults, kills and repeated batches, under a stopped clock."""

import errno
import random

import pytest

from metaq.errors import ClosedError, StorageError
from metaq.record.layout import HEADER, HEADER_BYTES
from tests.rigs.fs import FaultyFileSystem
from tests.rigs.storage import Ticket
from tests.sampling import examples
from tests.storage.offline import offline
from tests.storage.support import content_of, log_of, opened
from tests.storage.test_partition_log_batches import send

LIVES = examples(150)
STEPS = 80
SEGMENT = 120
RECORDS_MAX = 4
ERRORS = (errno.ENOSPC, errno.ENOSPC, errno.EIO, errno.EMFILE)
PLAIN = b"plain"


class Life:
    """A broker that is killed again and again, and a producer that repeats itself."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.fs = FaultyFileSystem(has_syncs=rng.random() < 0.5)
        self.bench = opened(self.fs, is_late=True, segment_bytes_max=SEGMENT)
        self.sequence, self.count = 0, 1
        self.ticket: Ticket | None = None
        self.plain_count = 0

    @property
    def is_over(self) -> bool:
        """Tell whether only a reboot helps: the names in a directory are not synced."""
        return any(c.name == "sync_directory" and c.error for c in self.fs.log)

    def step(self) -> None:
        """Let something happen."""
        match self.rng.randrange(8):
            case 0 | 1:
                self.send()
            case 2:
                self.put()
            case 3 | 4 | 5:
                self.bench.run()
            case 6:
                number = self.fs.calls + self.rng.randint(1, 12)
                taken = self.rng.choice([None, 0, 30])
                self.fs.fail_at(number, self.rng.choice(ERRORS), taken=taken)
            case _:
                self.kill()

    def kill(self) -> None:
        """Go on with what a kill leaves."""
        self.fs, self.ticket = self.fs.snapshot(), None
        self.bench = opened(self.fs, is_late=True, segment_bytes_max=SEGMENT)

    def send(self) -> None:
        """Send the next batch, or the last one again until it is known to be stored."""
        if self.ticket is not None and not self.ticket.is_answered:
            return
        if self.is_stored():
            self.sequence += self.count
            self.count = self.rng.randint(1, RECORDS_MAX)
        try:
            _batch, self.ticket = send(self.bench, self.sequence, self.count)
        except (StorageError, ClosedError):
            self.ticket = None

    def is_stored(self) -> bool:
        """Return the answer to the producer's last batch."""
        if self.ticket is not None:
            return self.ticket.is_stored
        log, repeat = log_of(self.bench), Ticket()
        known = log.producers.find("p", self.sequence, self.count, -1)
        if known is not None:
            log.join(known, repeat)
        return repeat.is_stored

    def put(self) -> None:
        """Put a message without a producer, and count it when it is stored."""
        ticket = Ticket()
        try:
            self.bench.append(log_of(self.bench), [PLAIN], ticket)
        except (StorageError, ClosedError):
            return
        self.bench.run()
        self.plain_count += ticket.is_stored

    def check(self) -> None:
        """Each record of a batch is there once, in order; ids grow; nothing is lost."""
        data, at, found = content_of(log_of(self.bench)), 0, []
        while at < len(data):
            length, _checksum, number, _flag = HEADER.unpack_from(data, at)
            at += HEADER_BYTES + length
            found.append((number, data[at - length : at]))
        assert found == sorted(found)
        batched = [int(payload) for _id, payload in found if payload != PLAIN]
        assert batched == list(range(self.sequence + self.count))
        assert len(found) - len(batched) >= self.plain_count


@pytest.mark.slow
def test_whatever_fails_in_a_life_each_record_is_stored_once(seed: int) -> None:
    """No message moves the ids on but those stored: a free id would be used again."""
    checked = 0
    for number in range(LIVES):
        life = Life(random.Random(seed + number))
        for _ in range(STEPS):
            life.step()
            if life.is_over:
                break
            if offline(life.bench.manager):
                life.kill()
        else:
            life.kill()
            if not life.is_stored():
                life.send()
                life.bench.run()
            life.check()
            checked += 1
        life.bench.close()
    assert checked > LIVES // 4
