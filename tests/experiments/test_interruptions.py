"""Experiments that are stopped from outside leave no process behind and keep what they measured; files may be damaged.

Processes are waited for by what they do, never by time: the limits are only there to end a test that hangs.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments import work_savings
from experiments.__main__ import main
from experiments.lab import catalog
from experiments.lab.report import write_report
from experiments.lab.run import find_result, read_result
from tests.sampling import few

ROOT = Path(__file__).parents[2]
LIMIT_S = 120
SCRIPT = """
import os, signal, sys, time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
import experiments.lab.run

HERE = Path(sys.argv[1])

@dataclass(frozen=True)
class Config:
    cells: int = 5

def measure(number):
    (HERE / f"began.{number}.{os.getpid()}").touch()
    while number >= 2 and not (HERE / "go").exists():
        time.sleep(0.01)
    return [{"number": number}]

class Numbers:
    def show(self, data): pass
    def cells(self, config): return [(f"cell {n}", partial(measure, n)) for n in range(config.cells)]
    def plot(self, data): return experiments.lab.plots.pyplot().figure()
    def answer(self, data): return str(len(data["rows"]))

if __name__ == "__main__":
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # what runs the tests may ignore some, which would be inherited
        signal.signal(getattr(signal, name), signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL)
    # two at once on any machine: cells 0 and 1 end, 2 and 3 begin
    experiments.lab.run.os.cpu_count = lambda: 2
    experiments.lab.run.run_experiment("numbers", HERE / "out", Config(), Numbers(), at_once=sys.argv[2] == "at once")
"""


def wait_for(condition, what):
    end = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < end, f"waited {LIMIT_S} s for {what}"
        time.sleep(0.02)
    return found


def alive(pid):
    """Whether a process runs; one that has ended and that its new parent has not waited for does not."""
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (ProcessLookupError, FileNotFoundError):
        return False


def begun(folder):
    """(cell, process) of each measurement that was begun."""
    return sorted(tuple(int(x) for x in path.name.split(".")[1:]) for path in folder.glob("began.*"))


def kept(folder):
    part = folder / "out" / "numbers.json.part"
    return sorted(json.loads(part.read_text())["cells"]) if part.exists() else []


def started(folder, how):
    (folder / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels")))}
    return subprocess.Popen(
        [sys.executable, str(folder / "script.py"), str(folder), how],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


EACH = ("SIGTERM", "SIGINT", "SIGHUP", "SIGKILL", "SIGTERM to the group", "SIGHUP to the group")


@pytest.mark.parametrize(
    ("name", "how"), few([("SIGTERM", "in turn"), *((name, "at once") for name in EACH), ("SIGHUP", "in turn")], 3)
)
def test_a_run_that_is_stopped_leaves_no_process_and_goes_on_where_it_was(tmp_path, name, how):
    process = started(tmp_path, how)
    last = 3 if how == "at once" else 2
    try:
        wait_for(lambda: process.poll() is not None or begun(tmp_path)[-1:] >= [(last, 0)], "cells that block")
        wait_for(lambda: process.poll() is not None or kept(tmp_path) == ["cell 0", "cell 1"], "cells that ended")
        number = getattr(signal, name.split()[0])
        assert process.poll() is None, process.communicate()
        (os.killpg if "group" in name else os.kill)(process.pid, number)
        out, _ = process.communicate(timeout=LIMIT_S)
        for _, pid in begun(tmp_path):
            wait_for(lambda pid=pid: not alive(pid), f"the end of {pid}")
    finally:
        for pid in {process.pid, *(pid for _, pid in begun(tmp_path))}:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    if name == "SIGKILL":
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 128 + number and "2 of 5 parts are kept" in out
    before = begun(tmp_path)
    (tmp_path / "go").touch()
    again = started(tmp_path, how)
    out, error = again.communicate(timeout=LIMIT_S)
    assert again.returncode == 0, error
    assert "2 of 5 parts are there from an interrupted run" in out
    assert sorted(cell for cell, _ in set(begun(tmp_path)) - set(before)) == [2, 3, 4]
    rows = json.loads((tmp_path / "out" / "numbers.json").read_text())["rows"]
    assert [row["number"] for row in rows] == [0, 1, 2, 3, 4]


def test_signals_are_handled_as_before_afterwards(tmp_path):
    from experiments.lab.run import Interrupted, interruptible

    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
        undone = []
        with pytest.raises(Interrupted, match="SIGTERM"), interruptible():
            os.kill(os.getpid(), signal.SIGHUP)  # ignored under nohup, and here
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                wait_for(lambda: False, "the signal")
            finally:
                os.kill(os.getpid(), signal.SIGTERM)  # an impatient user
                os.kill(os.getpid(), signal.SIGINT)
                undone.append(True)
        assert undone
        assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    finally:
        signal.signal(signal.SIGHUP, old)


# ---- damaged files


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    work_savings.main(["--smoke", "--out", str(out)])
    return (out / "work_savings.json").read_bytes()


DAMAGE = {
    "truncated": lambda whole: whole[: len(whole) // 2],
    "truncated in its last bytes": lambda whole: whole[:-3],
    "empty": lambda _: b"",
    "binary": lambda _: bytes(range(256)),
    "zeros, as after a crash": lambda whole: bytes(len(whole)),
    "a list": lambda _: b"[]",
    "null": lambda _: b"null",
    "a number": lambda _: b"3",
    "very deep": lambda _: b"[" * 200_000,
    "no rows": lambda whole: without(whole, "rows"),
    "no config": lambda whole: without(whole, "config"),
    "no environment": lambda whole: without(whole, "environment"),
    "an empty environment": lambda whole: changed(whole, environment={}),
    "a time that is none": lambda whole: changed(
        whole, environment={**json.loads(whole)["environment"], "time_utc": ""}
    ),
    "versions that are none": lambda whole: changed(
        whole, environment={**json.loads(whole)["environment"], "versions": 3}
    ),
    "rows that are none": lambda whole: changed(whole, rows={"a": 1}),
    "empty rows": lambda whole: changed(whole, rows=[{}]),
    "rows of text": lambda whole: changed(whole, rows=["a", "b"]),
    "rows of another version": lambda whole: changed(whole, rows=[{"speed": 1.0}]),
    "values of another kind": lambda whole: changed(
        whole, rows=[dict.fromkeys(row, "x") for row in json.loads(whole)["rows"]]
    ),
}


def without(whole, key):
    return json.dumps({name: value for name, value in json.loads(whole).items() if name != key}).encode()


def changed(whole, **changes):
    return json.dumps({**json.loads(whole), **changes}).encode()


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_result_is_told_by_every_reader(tmp_path, capsys, whole, damage):
    path = tmp_path / "work_savings.json"
    path.write_bytes(DAMAGE[damage](whole))
    found = find_result("work_savings", tmp_path, lambda: work_savings)
    assert found.startswith(f"{path} is no result of this version: ")
    main(["--out", str(tmp_path)])
    assert "is no result of this version" in " ".join(capsys.readouterr().out.split())
    page = write_report(tmp_path).read_text()
    assert "is no result of this version" in page and "Not run here" in page and page.endswith("</html>\n")


@pytest.mark.parametrize("damage", ["truncated", "binary", "rows of another version"])
def test_the_report_runs_anew_what_is_damaged(tmp_path, capsys, whole, damage):
    path = tmp_path / "work_savings.json"
    path.write_bytes(DAMAGE[damage](whole))
    main(["--report", "--only", "work_savings", "--out", str(tmp_path)])
    assert "is no result of this version" in " ".join(capsys.readouterr().out.split())
    made = path.read_bytes()
    assert isinstance(find_result("work_savings", tmp_path, lambda: work_savings), dict)
    main(["--report", "--only", "work_savings", "--out", str(tmp_path)])
    assert path.read_bytes() == made  # what is whole is not run again


def test_a_folder_in_the_place_of_a_result(tmp_path):
    (tmp_path / "work_savings.json").mkdir()
    assert "IsADirectoryError" in find_result("work_savings", tmp_path, lambda: work_savings)
    assert "is no result of this version" in write_report(tmp_path).read_text()


@pytest.mark.parametrize("damage", [name for name in DAMAGE if "row" not in name and name != "values of another kind"])
def test_what_is_no_result_is_a_value_error_that_names_the_file(tmp_path, whole, damage):
    path = tmp_path / "x.json"
    path.write_bytes(DAMAGE[damage](whole))
    with pytest.raises(ValueError, match=r"x\.json: expected|Invalid isoformat"):
        read_result(path)


@pytest.mark.parametrize("entry", catalog.entries(), ids=lambda entry: entry.name)
def test_rows_of_another_version_stop_no_page(tmp_path, whole, entry):
    (tmp_path / f"{entry.name}.json").write_bytes(changed(whole, rows=[{"speed": 1.0}]))
    page = write_report(tmp_path).read_text()
    assert f'id="{entry.name}"' in page and page.endswith("</html>\n")


@pytest.mark.parametrize("content", [b"", b"{", bytes(range(256)), b"[" * 200_000, b"[]", b'{"of": 3}', "other cells"])
def test_a_damaged_part_file_starts_anew(tmp_path, content):
    from tests.experiments.test_lab import Doubling, run

    part = tmp_path / "doubling.json.part"
    with pytest.raises(SystemExit):
        run(Doubling(interrupted_at=3), tmp_path)
    of = json.loads(part.read_text())["of"]
    for cells in (None, [1], {"size 1": 7}) if content == "other cells" else (None,):
        part.write_bytes(json.dumps({"of": of, "cells": cells}).encode() if content == "other cells" else content)
        again = Doubling()
        assert [row["doubled"] for row in run(again, tmp_path)["rows"]] == [2, 4, 6] and again.measured == [1, 2, 3]
