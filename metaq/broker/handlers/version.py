"""`version`: the heartbeat, and what this broker can do (broker spec 1.7)."""

from metaq.broker.context import BrokerContext
from metaq.protocol.version import SERVER_VERSION, Capabilities, encode_version_body


def handle_version(context: BrokerContext) -> bytes:
    """Return the body: version and capabilities."""
    limits = context.config.limits
    capabilities = Capabilities(
        SERVER_VERSION,
        has_mput=True,
        wait_ms_max=limits.wait_ms_max,
        payload_bytes_max=limits.payload_bytes_max,
        batch_bytes_max=limits.batch_bytes_max,
        batch_records_max=limits.batch_records_max,
        dedup=True,
        spans=True,
        codes=True,
        mput_tx=True,
        together=True,
    )
    return encode_version_body(capabilities).encode()
