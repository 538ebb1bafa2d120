"""Jars of Java programs that tests drive: resolved once by Ivy, kept in a cache.

PySpark carries Ivy, which knows where public jars are. Each list of artifacts has a
directory of its own in the user's cache; a directory that is there is whole.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from metaq.zk.embedded import EmbeddedZooKeeperError, find_java

RESOLVE_TIMEOUT_S = 150.0
"""Of one run of Ivy; it takes 20 s where nothing is in its cache."""

IVY_FILE = """\
<ivy-module version="2.0">
  <info organisation="tests" module="jars"/>
  <configurations><conf name="default"/></configurations>
  <dependencies>
{dependencies}
  </dependencies>
</ivy-module>
"""
IVY_DEPENDENCY = '    <dependency org="{}" name="{}" rev="{}" conf="default->default"/>'


class NoJarsError(Exception):
    """The jars cannot be had here; the text is one sentence that says why."""


class Artifact(NamedTuple):
    """Coordinates of a jar in a registry."""

    organisation: str
    name: str
    version: str


LOG4J = Artifact("log4j", "log4j", "1.2.17")
"""MetaQ speaks to it and leaves the choice of a version to others."""
CLIENT = Artifact("com.taobao.metamorphosis", "metamorphosis-client", "1.4.6.2")
CLIENT_EXTENSION = CLIENT._replace(name="metamorphosis-client-extension")
SERVER = CLIENT._replace(name="metamorphosis-server")


def find_jars(*artifacts: Artifact) -> list[Path]:
    """Return these jars and all that they need.

    Blocking; safe in several processes at once.

    Raises:
        NoJarsError: Java or PySpark is missing, or no registry answers.
    """
    root = cache_dir()
    words = "\n".join(":".join(one) for one in artifacts)
    wanted = root / hashlib.sha256(words.encode()).hexdigest()[:16]
    if not wanted.exists():
        started_s = time.time()
        with _locked(root):
            failed = wanted.with_suffix(".failed")
            # A process that waited here for one that failed need not fail again.
            if failed.exists() and failed.stat().st_mtime > started_s:
                raise NoJarsError(failed.read_text())
            if not wanted.exists():
                try:
                    _resolve(artifacts, root, wanted)
                except NoJarsError as error:
                    failed.write_text(str(error))
                    raise
    return sorted(wanted.glob("*.jar"))


def cache_dir() -> Path:
    """Return the user's cache for what tests fetch."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(base) / "metaq-tests" / "jars"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NoJarsError(f"no cache for jars: {error}") from error
    return path


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    with (root / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _find_ivy() -> Path:
    spec = importlib.util.find_spec("pyspark")
    for location in (spec and spec.submodule_search_locations) or ():
        for jar in (Path(location) / "jars").glob("ivy-*.jar"):
            return jar
    raise NoJarsError("no Ivy found to fetch jars with: PySpark brings it")


def _resolve(artifacts: tuple[Artifact, ...], root: Path, wanted: Path) -> None:
    ivy = _find_ivy()
    try:
        java = find_java()
    except EmbeddedZooKeeperError as error:
        raise NoJarsError(str(error)) from error
    with tempfile.TemporaryDirectory(dir=root) as place:
        found = Path(place) / "jars"
        lines = "\n".join(IVY_DEPENDENCY.format(*one) for one in artifacts)
        ivy_file = Path(place) / "ivy.xml"
        ivy_file.write_text(IVY_FILE.format(dependencies=lines))
        command = [
            java, f"-Divy.default.ivy.user.dir={root / 'ivy'}", "-jar", str(ivy),
            "-warn", "-ivy", str(ivy_file), "-cache", str(root / "ivy" / "cache"),
            "-confs", "default", "-types", "jar", "bundle",
            "-retrieve", f"{found}/[artifact]-[revision](-[classifier]).[ext]",
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command, capture_output=True, timeout=RESOLVE_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise NoJarsError(
                f"no registry gave the jars in {RESOLVE_TIMEOUT_S:.0f} s"
            ) from error
        if done.returncode != 0 or not found.is_dir():
            log = wanted.with_suffix(".log")
            log.write_bytes(done.stdout + done.stderr)
            names = ", ".join(f"{one.name} {one.version}" for one in artifacts)
            raise NoJarsError(f"no registry gave {names}: Ivy says why in {log}")
        shutil.move(found, wanted)
