"""`metaq request`: a reply on standard output, or one sentence."""

import base64
import json
import threading

import pytest

from metaq.cli.cluster import Target
from metaq.cli.request import request
from metaq.client import Client, ErrorReply, Message, ReplyTimeoutError
from metaq.testing.embedded import embedded_broker

ONE_BROKER = {
    "test_a_reply_is_printed_as_it_came": "MetaQ has no queue groups",
}


@pytest.mark.slow
def test_a_reply_is_printed_as_it_came(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    """Followed by a line end; a failure of the handler, and no reply, are errors."""

    def echo(message: Message) -> bytes:
        if message.data == b"bad":
            raise ValueError("no such price")
        return (
            message.data
            + b"\xff"
            + message.headers["from"]
            + (message.tag or "").encode()
            + (message.key or b"")
        )

    headers = (("from", b"cli"),)
    with embedded_broker(topics={"prices": 1}) as broker:
        target = Target("memory", "/meta", (), 20.0, broker.coordinator_factory)
        with Client(**broker.client_options) as client:
            responder = client.responder("prices", group="quotes")
            thread = threading.Thread(target=responder.run, args=(echo,))
            thread.start()
            request(target, "prices", "ACME", "k", headers, "t", as_json=False)
            assert capfdbinary.readouterr().out == b"ACME\xffclitk\n"
            request(target, "prices", "ACME", "k", headers, "t", as_json=True)
            printed = json.loads(capfdbinary.readouterr().out)
            coded = base64.b64encode(b"ACME\xffclitk").decode()
            assert printed == {"topic": "prices", "data": None, "data_base64": coded}
            with pytest.raises(ErrorReply, match="ValueError: no such price"):
                request(target, "prices", "bad", None, headers, None, as_json=False)
        thread.join(30)
        short = Target("memory", "/meta", (), 2.0, broker.coordinator_factory)
        with pytest.raises(ReplyTimeoutError, match="no reply within"):
            request(short, "prices", "ACME", None, headers, None, as_json=False)
