"""`metaq hand-over`: prepare a data directory for a Java broker, or take it back."""

from pathlib import Path

import click

from metaq.broker.hand_over import HandOver, hand_over, plan_hand_over, take_back
from metaq.cli import render
from metaq.cli.inspect_log import check, list_segments, require_data_directory
from metaq.cli.options import flag, json_option, yes_option
from metaq.cli.tree import command
from metaq.config.keys import METAQ_TOPIC_KEYS
from metaq.fs import LOCK_FILE, FileSystem, SystemFileSystem
from metaq.storage.inventory import TRANSACTIONS, read_holdings
from metaq.storage.verify import FindingKind, list_logs


@command(
    "hand-over",
    click.argument(
        "directory",
        type=click.Path(
            exists=True, file_okay=False, path_type=Path, resolve_path=True
        ),
    ),
    flag(
        "--back",
        "is_back",
        help="Move the files back, after the Java broker has stopped.",
    ),
    json_option,
    yes_option,
    examples=(
        "metaq hand-over /var/lib/metaq",
        "metaq hand-over /var/lib/metaq --back",
    ),
)
def hand_over_directory(
    directory: Path, *, is_back: bool, as_json: bool, is_sure: bool
) -> bool:
    """Prepare a data directory for a Java broker, or take it back.

    Checks every stored byte of DIRECTORY, prints the changes and asks for confirmation.
    Files that only a broker of this project uses move to DIRECTORY.handed-over. No
    broker may be running on DIRECTORY.
    """
    fs = SystemFileSystem()
    segments = list_segments(fs, (path for _id, path in list_logs(fs, directory)))
    if not segments:
        require_data_directory(fs, directory)
    was_locked_before = fs.exists(directory / LOCK_FILE)
    is_ready = False
    lock = fs.lock_directory(directory)
    try:
        if is_back:
            names = take_back(fs, directory)
            if as_json:
                render.print_json({"directory": str(directory), "moved_back": names})
            else:
                click.echo(f"moved back: {', '.join(names) or 'nothing'}")
            return True
        plan = plan_hand_over(fs, directory)
        _show(plan, as_json=as_json)
        if not (_may_move(plan) and _is_sound(fs, directory, segments)):
            return False
        question = f"Make {directory} ready for a Java broker?"
        render.may_change(question, is_dry=False, is_sure=is_sure)
        hand_over(fs, plan)
        is_ready = True
    finally:
        if is_ready or not was_locked_before:
            fs.discard(directory / LOCK_FILE)
        lock.release()
    render.say(
        "ready for a Java broker; before this project's broker uses it again:"
        f" metaq hand-over {directory} --back"
    )
    return True


def _show(plan: HandOver, *, as_json: bool) -> None:
    sections = {
        topic: {
            "numPartitions": str(definition.partitions),
            **{k: v for k, v in definition.settings.items() if k in METAQ_TOPIC_KEYS},
        }
        for topic, definition in plan.topics.items()
    }
    if as_json:
        render.print_json(
            {
                "directory": str(plan.directory),
                "aside": str(plan.aside),
                "move": plan.moved,
                "remove": plan.removed,
                "others": plan.others,
                "topics": sections,
            }
        )
        return
    for name in plan.moved:
        click.echo(f"move {plan.directory / name} to {plan.aside / name}")
    for name in plan.removed:
        click.echo(f"remove {plan.directory / name}")
    if sections:
        click.echo("topics made by command, for the server.ini of the Java broker:")
    for topic, keys in sections.items():
        lines = (f"{key}={value}" for key, value in keys.items())
        click.echo("\n".join((f"[topic={topic}]", *lines)))


def _may_move(plan: HandOver) -> bool:
    """Return whether the plan can be carried out; print the obstacles."""
    for name in plan.others:
        advice = "move it elsewhere"
        if name == TRANSACTIONS:
            advice += ", and set dataLogPath to that directory for both brokers; start"
            advice += " and stop this one with it"
        render.say(
            f"{plan.directory / name} is no partition, and a Java broker may skip"
            f" partitions for it: {advice}"
        )
    if plan.problem and TRANSACTIONS not in plan.others:
        render.say(plan.problem)
    return not (plan.others or plan.problem)


def _is_sound(fs: FileSystem, directory: Path, segments: list[Path]) -> bool:
    """Return whether a Java broker would serve all records; print the faults."""
    report = check(fs, directory, segments, in_use=False)
    faults = [
        finding
        for finding in report.findings
        if finding.kind in (FindingKind.DAMAGE, FindingKind.NAME)
    ]
    for finding in faults:
        render.say(str(finding))
    if faults:
        render.say(
            "a Java broker cuts its active segment at the first damaged record, and"
            " does not check the others: restore them from a copy first"
        )
        return False
    record = read_holdings(fs, directory)
    if record is not None and not record.is_sealed:
        render.say(
            "the last broker here was killed: if you can, start it and stop it with"
            " SIGTERM before, so that a Java broker finds nothing half done"
        )
    return True
