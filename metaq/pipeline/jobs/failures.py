"""Sentence for a failed Spark job, in place of a stack trace."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException

from metaq.pipeline.errors import JobError

_OWN: Final = re.compile(r"^(?:.*?: )?metaq\.[\w.]+: (.+)$", re.MULTILINE)
"""Our errors as Python prints them, alone or at the end of a trace that Spark
quotes."""
SPARK_ERRORS: Final = (PySparkException, Py4JError)
"""Errors raised by calls of Spark: of the JVM, with or without a type of Spark's."""
SENTENCE_CHARS_MAX: Final = 2000
"""Longest quotation of Spark's text in a message."""
NOT_FOUND: Final = "[DATA_SOURCE_NOT_FOUND]"
"""Spark's error for an unknown format."""
NOT_FOUND_CURE: Final = (
    "Spark does not find the format metaq in the Python that it starts for its own"
    " work: call metaq.spark.register(spark) first, or set PYSPARK_PYTHON to an"
    " interpreter that has this package"
)

UNREACHABLE: Final = "StatusCode.UNAVAILABLE"
"""In the text of Spark Connect when its server does not answer."""
GONE: Final = "Spark's driver has gone"


def sentence_of(error: Exception) -> str:
    """Return the subject of an error of Spark.

    Our own errors cross from tasks as text; theirs is the sentence that names the
    partition and the offsets. Else it is the first line.
    """
    text = str(error)
    if isinstance(error, Py4JJavaError):
        # Its first line names the call that failed, the next one the cause.
        text = text.partition("\n")[2].removeprefix(": ")
    if NOT_FOUND in text and "metaq" in text:
        return NOT_FOUND_CURE
    own = _OWN.findall(text)
    if UNREACHABLE in text and not own:
        return GONE
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    sentence = own[-1] if own else (lines or [type(error).__name__])[0]
    return sentence[:SENTENCE_CHARS_MAX].strip()


@contextmanager
def job_errors(job: str) -> Iterator[None]:
    """Turn errors of Spark into one sentence.

    Args:
        job: name of the failed job, for the message.

    Raises:
        JobError: Spark failed in the body.
    """
    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        raise JobError(f"{job}: {sentence_of(error)}") from error
    except (Py4JError, ConnectionRefusedError) as error:
        reason = getattr(error, "strerror", None) or sentence_of(error)
        raise JobError(f"{job}: {GONE}: {reason}") from error
