"""The words of `metaq pipeline`: help, refusals, defaults."""

import pytest

from tests.cli.runner import run

JOBS = ("archive", "replay", "ingest", "stats", "audit", "verify")


@pytest.mark.parametrize("job", JOBS)
def test_every_job_has_help_with_examples(job: str) -> None:
    """Also without Spark."""
    result = run("pipeline", job, "--help")
    assert result.exit_code == 0
    assert f"metaq pipeline {job}" in result.output
    assert "--master" in result.output


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("archive", "t"), "--to"),
        (("archive", "--to", "x"), "TOPIC"),
        (("audit", "t"), "exactly one of --archive and --copy"),
        (("audit", "t", "--archive", "a", "--copy", "b"), "exactly one of"),
        (("archive", "t", "--to", "x", "--option", "y"), "expected KEY=VALUE, got 'y'"),
        (("verify", "x", "--conf", "=y"), "expected KEY=VALUE, got '=y'"),
        (("stats", "t", "--window", "0"), "--window"),
        (("audit", "t", "--archive", "a", "--id", "key"), "--id has no effect without"),
        *(
            ((*words, "--option", option), f"{name} is set by the topics of")
            for name, option, *words in (
                ("subscribe", "subscribe=u", "archive", "t", "--to", "x"),
                ("subscribe", "Subscribe=u", "stats", "t"),
                ("subscribe", "subscribe=u", "audit", "t", "--archive", "a"),
                ("subscribe", "subscribe=u", "audit", "t", "--copy", "c"),
                ("topic", "topic=u", "ingest", "t", "x", "--format", "text"),
                ("topic", "TOPIC=u", "replay", "x", "--topic", "t"),
            )
        ),
    ],
)
def test_wrong_words_are_refused(words: tuple[str, ...], what: str) -> None:
    """Before Spark starts, which takes seconds."""
    result = run("pipeline", *words)
    assert result.exit_code == 2
    assert what in result.output


def test_the_window_is_that_of_the_job() -> None:
    """Said twice, because the command does not load Spark for its help."""
    from metaq.cli.pipeline_jobs import WINDOW_S
    from metaq.pipeline.jobs import window_stats

    assert window_stats.WINDOW_S == WINDOW_S
