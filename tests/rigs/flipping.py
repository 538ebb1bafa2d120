"""A proxy that flips bits: answers are damaged in transit, stored bytes are not."""

from typing import Any

from metaq.testing.proxy import Proxy


class FlippingProxy(Proxy):
    """Flips a bit of each answer that contains `wanted`, while `left` is above 0."""

    def __init__(self, port: int, wanted: bytes, *, left: int) -> None:
        super().__init__("127.0.0.1", port)
        self._wanted = wanted
        self.left = left
        """Number of answers still to damage; any thread may set it."""
        self.flip_count = 0

    def _make_end(self) -> Any:
        client: Any = super()._make_end()
        server = client.peer
        receive, rest_bytes, before = server.data_received, len(self._wanted) - 1, b""

        def data_received(data: bytes) -> None:
            nonlocal before
            # An answer may be split anywhere.
            joined = before + data
            at = joined.find(self._wanted) + rest_bytes - len(before)
            before = joined[-rest_bytes:]
            if self._wanted in joined and self.left > 0:
                self.left -= 1
                self.flip_count += 1
                data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
            receive(data)

        server.data_received = data_received
        return client
