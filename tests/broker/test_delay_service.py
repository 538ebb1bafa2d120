"""Delayed messages of a broker: delivered once, not early, whatever happens."""

import asyncio

from tests.broker.delay_rig import DelayRig


def test_a_message_is_delivered_when_it_is_due_and_not_before() -> None:
    """Its order is that of the due times; a tick delivers all that is due."""

    async def main() -> None:
        rig = await DelayRig().start()
        now = rig.now_ms
        await rig.schedule(b"late", due_ms=now + 2000)
        await rig.schedule(b"early", b"with it", due_ms=now + 1000)
        assert await rig.tick() == 0
        assert await rig.pass_s(0.999) == 0
        assert await rig.pass_s(0.001) == 1
        assert rig.payloads() == [b"early", b"with it"]
        assert await rig.pass_s(60.0) == 1
        assert rig.payloads() == [b"early", b"with it", b"late"]
        again = await rig.again()
        assert await again.tick() == 0
        assert again.payloads() == [b"early", b"with it", b"late"]
        await again.kill()

    asyncio.run(main())
