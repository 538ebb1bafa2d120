"""scripts/install on machines that lack something: one sentence, nothing half done.

The machine is a directory of links and small fakes that stands alone on PATH.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = ("bash", "dirname", "id", "sha256sum", "flock", "cat", "rm", "mv", "sleep")
MORE_TOOLS = ("env", "head", "tail", "cut", "mkdir", "chmod", "cp")

JAVA = "echo 'openjdk version \"{version}\" 2024-01-01' >&2"
# Answers what scripts/install asks; `-m venv` copies it into the environment.
PYTHON = """case "$*" in
*ensurepip*) exit {no_venv} ;;
*python_version*) echo {version} ;;
*"-m venv"*) mkdir -p "$4/bin"; cp "$0" "$4/bin/python" ;;
*"-m pip"*) echo "pip $*" >> "${{0%/bin/python}}/../calls"; exit {pip} ;;
esac"""


class Machine:
    """A checkout with scripts/install, and a PATH with chosen programs."""

    def __init__(self, root: Path) -> None:
        self.bin = root / "bin"
        self.checkout = root / "checkout"
        (self.checkout / "scripts").mkdir(parents=True)
        self.bin.mkdir()
        shutil.copy(ROOT / "scripts" / "install", self.checkout / "scripts")
        (self.checkout / "pyproject.toml").write_text("[project]\n")
        for tool in TOOLS + MORE_TOOLS:
            found = shutil.which(tool)
            assert found, tool
            (self.bin / tool).symlink_to(found)

    def fake(self, name: str, script: str, room: Path | None = None) -> None:
        path = (room or self.bin) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!{shutil.which('bash')}\n{script}\n")
        path.chmod(0o755)

    def python(
        self,
        version: str = "3.11.9",
        *,
        name: str = "python3",
        no_venv: int = 0,
        pip: int = 0,
    ) -> None:
        script = PYTHON.format(version=version, no_venv=no_venv, pip=pip)
        self.fake(name, script)

    def java(self, version: str) -> None:
        self.fake("java", JAVA.format(version=version))

    def install(self, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.checkout / "scripts" / "install"],
            cwd="/",
            env={"PATH": str(self.bin), **environment},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    @property
    def pip_calls(self) -> int:
        calls = self.checkout / "calls"
        return len(calls.read_text().splitlines()) if calls.exists() else 0


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Return a machine without Python, Java and package manager."""
    return Machine(tmp_path)


@pytest.mark.parametrize("version", [None, "1.8.0_402", "11.0.2"])
def test_a_machine_without_java_is_told_what_to_install(
    machine: Machine, version: str | None
) -> None:
    """No Java, or one that is too old, ends in one sentence with a package name."""
    machine.python()
    if version:
        machine.java(version)
    done = machine.install()
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "openjdk-17-jre-headless" in done.stderr
    assert not (machine.checkout / ".venv").exists()


def test_all_that_a_machine_lacks_is_said_at_once(machine: Machine) -> None:
    """One request to an administrator is enough, with the names of this release."""
    machine.python(no_venv=1)
    machine.fake("apt-cache", "[[ $2 == default-* ]] && echo Package: $2")
    done = machine.install()
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "no Java 17 or newer found" in done.stderr
    assert "install the packages default-jre-headless and python3.11-venv." in (
        done.stderr
    )


def test_a_machine_without_python_is_told_what_to_install(machine: Machine) -> None:
    """No interpreter ends in one sentence."""
    machine.java("17.0.9")
    done = machine.install()
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "no Python 3.11 or newer found" in done.stderr


@pytest.mark.parametrize("version", ["2.7.18", "3.10.13", "3.13.0t", "4.0.0"])
def test_a_chosen_interpreter_that_does_not_fit_is_refused(
    machine: Machine, version: str
) -> None:
    """PYTHON is taken at its word or not at all."""
    machine.java("17.0.9")
    machine.python()
    machine.python(version, name="chosen")
    done = machine.install(PYTHON="chosen")
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "PYTHON=chosen is not" in done.stderr
    assert not (machine.checkout / ".venv").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("versions", "chosen"),
    [
        (["3.12.1", "3.13.0"], "python3"),
        (["3.10.2", "3.12.1", "3.11.7"], "python3.12"),
        (["3.14.0", "3.13.0", "3.14.0"], "python3.13"),
        (["3.13.0t", "3.11.7"], "python3.11"),
        (["3.14.0", "3.10.2"], "python3"),
    ],
)
def test_of_several_interpreters_one_is_taken_that_tests_have_run_on(
    machine: Machine, versions: Sequence[str], chosen: str
) -> None:
    """The system's own comes first, and a newer one is better than none."""
    machine.java("17.0.9")
    machine.python(versions[0])
    for version in versions[1:]:
        machine.python(version, name="python" + version.rpartition(".")[0])
    done = machine.install()
    assert done.returncode == 0
    assert f"making .venv with {chosen} (" in done.stderr
    is_newest = chosen == "python3" and versions[0] == "3.14.0"
    assert ("newer than those" in done.stderr) == is_newest


def test_the_package_names_the_versions_that_are_preferred() -> None:
    """Its classifiers are those between the bounds of scripts/install."""
    script = (ROOT / "scripts" / "install").read_text()
    low, high = map(int, re.findall(r"^python_minor_m..=(\d+)$", script, re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [each for each in project["classifiers"] if " :: Python :: " in each]
    assert named == [
        f"Programming Language :: Python :: 3.{minor}" for minor in range(low, high + 1)
    ]
    assert project["requires-python"] == f">=3.{low}"


def test_an_interpreter_without_venv_is_told_its_package(machine: Machine) -> None:
    """Debian cuts ensurepip off; the sentence names the package that brings it."""
    machine.java("17.0.9")
    machine.python(no_venv=1)
    done = machine.install()
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "python3.11-venv" in done.stderr


@pytest.mark.slow
def test_missing_java_comes_from_the_package_manager(machine: Machine) -> None:
    """If apt-get may be used, the runtime is installed and the work goes on."""
    machine.python()
    (machine.bin / "id").unlink()
    machine.fake("id", "echo 0")
    made = JAVA.format(version="17.0.9").replace('"', '\\"').replace("'", "\\'")
    machine.fake(
        "apt-get",
        f"[[ $* == *openjdk-17-jre-headless* ]] || exit 0\n"
        f"echo Unpacking\n"
        f"echo $'#!{shutil.which('bash')}\\n{made}' > {machine.bin}/java\n"
        f"chmod 755 {machine.bin}/java",
    )
    done = machine.install()
    assert (done.returncode, done.stderr[-5:]) == (0, "done\n")
    assert "Unpacking" not in done.stderr


def test_what_apt_get_says_is_shown_when_it_fails(machine: Machine) -> None:
    """Behind it the one sentence about what is missing."""
    machine.python()
    (machine.bin / "id").unlink()
    machine.fake("id", "echo 0")
    machine.fake("apt-get", "[[ $* == *update* ]] || { echo E: no room; exit 100; }")
    done = machine.install()
    assert done.returncode == 1
    assert "E: no room\n" in done.stderr
    assert "no Java 17 or newer found" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_an_unfit_java_home_gives_way_to_the_path(machine: Machine) -> None:
    """JAVA_HOME is looked at first and left when it is too old."""
    machine.python()
    machine.java("21")
    machine.fake("java", JAVA.format(version="11.0.1"), machine.bin / "old" / "bin")
    done = machine.install(JAVA_HOME=str(machine.bin / "old"))
    assert done.returncode == 0
    assert "JAVA_HOME has no Java 17 or newer" in done.stderr


@pytest.mark.slow
def test_a_second_run_does_nothing_until_the_project_changes(
    machine: Machine,
) -> None:
    """The stamp stands for pyproject.toml; pip is called only when it differs."""
    machine.python()
    machine.java("17.0.9")
    assert machine.install().returncode == 0
    first = machine.pip_calls
    again = machine.install()
    assert (again.returncode, again.stderr, machine.pip_calls) == (0, "", first)
    (machine.checkout / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert machine.install().returncode == 0
    assert machine.pip_calls > first > 0


@pytest.mark.slow
def test_a_failed_installation_leaves_no_stamp(machine: Machine) -> None:
    """When pip fails the run fails, and the next one starts from an empty room."""
    machine.java("17.0.9")
    machine.python(pip=1)
    done = machine.install()
    assert done.returncode == 1
    assert "could not install the dependencies" in done.stderr
    assert not (machine.checkout / ".venv" / "installed").exists()
    machine.python()
    assert machine.install().returncode == 0


@pytest.mark.slow
def test_runs_at_once_install_once(machine: Machine) -> None:
    """The second of two runs waits for the first and finds everything done."""
    machine.python()
    machine.java("17.0.9")
    command = [machine.checkout / "scripts" / "install"]
    environment = {"PATH": str(machine.bin)}
    runs = [
        subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        for _ in range(3)
    ]
    assert [run.wait(30) for run in runs] == [0, 0, 0]
    alone = machine.pip_calls
    shutil.rmtree(machine.checkout / ".venv")
    assert machine.install().returncode == 0
    assert machine.pip_calls == 2 * alone


@pytest.mark.slow
@pytest.mark.parametrize(
    ("leak", "outcome"),
    [("sock = socket.socket()", 1), ("socket.socket().close()", 0)],
)
def test_an_unclosed_resource_fails_the_test_that_left_it(
    tmp_path: Path, leak: str, outcome: int
) -> None:
    """Our pytest settings turn a leaked socket into a failure."""
    done = run_pytest(tmp_path, f"import socket\ndef test_leak():\n    {leak}\n")
    assert done.returncode == outcome, done.stdout
    assert "METAQ_SEED=7" in done.stdout


LATE = """
import pytest

@pytest.mark.spark
@pytest.mark.parametrize("late_count", [2, 3])
def test_spark(tmp_path, late_count):
    with tmp_path.with_name(f"tries-{late_count}").open("a+") as tries:
        tries.write("x")
        tries.seek(0)
        number = len(tries.read())
    assert not list(tmp_path.iterdir())
    (tmp_path / "left").touch()
    words = "Query [id = 2b6ebfeb-f259-4bb5-93ab] terminated with exception:"
    error = f"[STREAM_FAILED] {words} Python worker failed to connect back."
    assert (1, error if number <= late_count else "") == (1, "")

def test_else():
    raise RuntimeError("Python worker failed to connect back.")
"""


@pytest.mark.slow
def test_spark_is_tried_again_when_it_gave_up_on_its_python(tmp_path: Path) -> None:
    """Twice, each time with new fixtures, and nothing else is."""
    done = run_pytest(tmp_path, LATE)
    assert "2 failed, 1 passed" in done.stdout
    assert "test_spark[3]" in done.stdout
    assert "test_else" in done.stdout


MATRIX = """
import pytest

@pytest.mark.sampled(2)
@pytest.mark.parametrize("column", range(3))
@pytest.mark.parametrize("row", range(5))
def test_matrix(row, column):
    print(f"ran {row}-{column}")

def test_else():
    pass
"""


@pytest.mark.slow
def test_a_matrix_is_sampled_by_the_seed(tmp_path: Path) -> None:
    """All workers have the same cells; its seed repeats them, others have others."""
    two = ("-n", "2", "--dist", "loadfile")
    seed, cells = cells_of(tmp_path, *two, METAQ_SEED="")
    assert cells_of(tmp_path, METAQ_SEED=seed) == (seed, cells)
    others = (f"{int(seed) + number}" for number in (1, 2, 3))
    assert any(cells_of(tmp_path, METAQ_SEED=one) != (one, cells) for one in others)


def cells_of(directory: Path, *words: str, **variables: str) -> tuple[str, set[str]]:
    """Run two cells of the matrix; return the seed that was printed, and the cells."""
    done = run_pytest(directory, MATRIX, "-rP", *words, **variables)
    assert "3 passed" in done.stdout
    (seed,) = {*re.findall(r"METAQ_SEED=(\d+)", done.stdout)}
    cells = {*re.findall("ran .-.", done.stdout)}
    assert len(cells) == 2
    return seed, cells


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "variables", "count"),
    [
        ((), {"METAQ_WHOLE": "1"}, 16),
        (("-k", "test_matrix and 4-2"), {}, 1),
        (("-k", "test_matrix and 4-"), {}, 2),
    ],
)
def test_what_is_asked_for_runs(
    tmp_path: Path, words: Sequence[str], variables: dict[str, str], count: int
) -> None:
    """All of a matrix, or the cells that were named."""
    done = run_pytest(tmp_path, MATRIX, *words, **variables)
    assert f"{count} passed" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("-n", "1")], ids=["alone", "a worker"])
def test_whatever_fails_is_told(tmp_path: Path, words: Sequence[str]) -> None:
    """Workers send no report of a setup or teardown in which all went well."""
    text = "import pytest\n"
    for part in ("1 / 0\n    yield", "yield\n    1 / 0", "yield"):
        number = text.count("def test")
        text += f"@pytest.fixture\ndef part{number}():\n    {part}\n"
        text += f"def test_{number}(part{number}): assert {number} < 2\n"
    text += "def test_skipped(): pytest.skip('so')\n"
    done = run_pytest(tmp_path, text, *words)
    assert "1 failed, 1 passed, 1 skipped, 2 errors" in done.stdout


def run_pytest(
    directory: Path, text: str, *words: str, **variables: str
) -> "subprocess.CompletedProcess[str]":
    """Run tests with the settings of ours."""
    ours = {**os.environ, "METAQ_SEED": "7"}
    ours.pop("METAQ_WHOLE", None)
    test = directory / "test_it.py"
    test.write_text(text)
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest"),
            *("-p", "no:cacheprovider", "--basetemp", directory / "base"),
            *("-c", ROOT / "pyproject.toml", "--rootdir", directory, test, *words),
        ],
        cwd=ROOT,
        env={**ours, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
