"""Options that mean nothing are refused before the cluster is asked."""

import pytest
from click.testing import CliRunner

from metaq.cli.main import main

NOWHERE = ["--zookeeper", "127.0.0.1:1", "--timeout", "0.01"]
"""Nothing answers there, and it would be said."""
BAD_BYTE = "\udcff"

REFUSED = [
    ("produce t --delay abc", "expected a time such as '30m'"),
    ("produce t --delay 5", "expected a time such as '30m'"),
    ("produce t --expires-in 1x", "expected a time such as '30m'"),
    ("produce t --expires-in 0s", "expected more than 0 s"),
    ("produce t --at tomorrow", "--at"),
    ("produce t --delay 1s --at 2030-01-01", "exclude each other"),
    ("produce t --partition first", "expected BROKER-NUMBER"),
    ("produce t --header a", "expected NAME=VALUE"),
    ("produce t --header =b", "expected NAME=VALUE"),
    ("produce t --header tag=a --tag b", "--tag and --header tag"),
    (f"produce t --key {BAD_BYTE}", "'--key': expected UTF-8, got '\\udcff'"),
    (f"produce t --tag {BAD_BYTE}", "'--tag'"),
    (f"produce t --attribute {BAD_BYTE}", "'--attribute'"),
    (f"produce t --header {BAD_BYTE}=1", "'--header'"),
    ("produce a/b", "'TOPIC': expected a name"),
    ("cat a/b", "'TOPIC': expected a name"),
    ("cat t --partition 0-x", "expected BROKER-NUMBER"),
    ("request a/b x", "'TOPIC': expected a name"),
    (f"request t x --key {BAD_BYTE}", "'--key'"),
    ("request t x --header a", "expected NAME=VALUE"),
    ("request t x --header tag=a --tag b", "--tag and --header tag"),
    ("find a/b --key k", "'TOPIC': expected a name"),
    ("find t --header a", "expected NAME=VALUE"),
    (f"find t --key {BAD_BYTE}", "'--key'"),
    ("find t --id 9223372036854775808", "'--id'"),
    ("find t --key k --id 5", "expected exactly one of --key"),
    ("find t --key k --since soon", "'--since'"),
    ("find t --key k --partition x", "expected BROKER-NUMBER"),
    ("scheduled list --topic a/b", "'--topic': expected a name"),
    ("scheduled list --from soon", "'--from'"),
    ("scheduled cancel a/b", "'TOPIC': expected a name"),
    ("queues create a/b --topic t --then drop", "'GROUP'"),
    ("queues create g --topic a/b --then drop", "'--topic': expected a name"),
    ("queues create g --topic t --dead-letter-topic a/b", "'--dead-letter-topic'"),
    ("queues create g --topic t --then drop --dead-letter-topic d", "exclude each"),
    ("queues create g --topic t --then drop --where tag", "'--where'"),
    ("queues alter g --where tag", "'--where'"),
    (f"queues redrive g --key {BAD_BYTE}", "'--key': expected UTF-8"),
    ("queues alter g", "expected at least one option"),
    ("exchanges create a/b", "'EXCHANGE': expected a name"),
    ("exchanges create e --alternate a/b", "'--alternate': expected a name"),
    ("exchanges delete a/b", "'EXCHANGE': expected a name"),
    ("exchanges bind e a/b", "'TOPIC': expected a name"),
    ("exchanges bind e t --header =1", "expected NAME, or NAME=VALUE"),
    (f"exchanges bind e t --key {BAD_BYTE}", "'--key'"),
    (f"exchanges bind e t --header {BAD_BYTE}", "'--header': expected UTF-8"),
    ("exchanges unbind e a/b", "'TOPIC': expected a name"),
    (f"exchanges route e {BAD_BYTE}", "'[ROUTING_KEY]'"),
    ("exchanges route e k --header a", "expected NAME=VALUE"),
]


@pytest.mark.parametrize(("line", "text"), REFUSED)
def test_a_malformed_option_is_wrong_usage(line: str, text: str) -> None:
    """Nothing is asked that would need the cluster."""
    result = CliRunner().invoke(main, [*line.split(" "), *NOWHERE])
    assert result.exit_code == 2, result.output
    assert text in result.output


def test_what_makes_sense_is_asked(capfd: pytest.CaptureFixture[str]) -> None:
    """The address of the table is one that does not answer."""
    line = "produce t --delay 1h30m --tag a --partition 0-1 --header x=y"
    result = CliRunner().invoke(main, [*line.split(" "), *NOWHERE])
    assert result.exit_code == 1
    assert "no ZooKeeper answers" in result.output + capfd.readouterr().err
