"""`metaq pipeline schema`: a look at some messages, and a schema that fits them."""

from contextlib import closing
from itertools import islice
from typing import Final

import click

from metaq.cli import render
from metaq.cli.cluster import Target, find_topic
from metaq.cli.spark_session import require_spark
from metaq.client.options import Start

SAMPLE_BYTES_MAX: Final = 16 * 1024 * 1024
"""Bytes of the messages that are looked at, exceeded by less than one of them."""


def show_schema(
    target: Target, topic: str, *, count: int, start: Start, as_json: bool
) -> bool:
    """Print a schema that fits messages of a topic; return whether there is one.

    Args:
        target: the cluster.
        topic: its name.
        count: messages that are looked at, as many of each partition.
        start: the first of them.
        as_json: print an object.

    Raises:
        PartitionsAwayError: a broker of the topic is away.
        MetaqError: the messages cannot be read.
    """
    require_spark()
    from metaq.spark.decode import proposal

    values = read_sample(target, topic, count, start)
    found = proposal.propose(values)
    if as_json:
        facts = {} if found is None else proposal.to_json(found)
        render.print_json({"topic": topic, "messages": len(values), **facts})
    elif found is not None:
        render.print_rows(
            ("field", "type", "required", "count"),
            [(f.name, f.type, f.is_required, f.count) for f in found.fields],
            as_json=False,
        )
        click.echo(proposal.expression(found))
    looked_at = render.count_text(len(values), "message")
    if found is None:
        render.say(
            f"topic {topic}: {looked_at} looked at; fewer than half of them have one of"
            " the formats that are known: JSON objects, CSV, log lines, Avro with a"
            " fingerprint"
        )
        return False
    render.say(
        f"topic {topic}: {looked_at} looked at, {found.fit_count} fit as"
        f" {found.form.value}"
    )
    for error, times in found.errors:
        render.say(f"{render.count_text(times, 'message')}: {error}")
    return True


def read_sample(target: Target, topic: str, count: int, start: Start) -> list[bytes]:
    """Return the data of some messages of a topic, as many of each partition.

    Args:
        target: the cluster.
        topic: its name.
        count: most messages; `SAMPLE_BYTES_MAX` bounds their bytes.
        start: the first of them.
    """
    found = find_topic(target, topic, (), kind="gets")
    values: list[bytes] = []
    size_bytes = 0
    with found.target.client() as client:
        for number, partition in enumerate(found.partitions):
            left = len(found.partitions) - number
            # What a partition lacks, those behind it may have.
            share = -(-(count - len(values)) // left)
            messages = client.browse(
                topic,
                partitions=[partition.name],
                start=start,
                stop_at_end=True,
            )
            with closing(messages):
                for message in islice(messages, share):
                    values.append(message.data)
                    size_bytes += len(message.data)
                    if size_bytes >= SAMPLE_BYTES_MAX:
                        return values
    return values
