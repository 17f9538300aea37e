"""How an experiment is run: cell by cell, the rows of each kept as they come, and shown from the file alone.

An experiment is a module with a docstring (question, expectation, command), one frozen config, and::

    ENTRY             where it stands in the list and in the report: `experiments.lab.catalog`
    cells(config)     its cells: a name, and what measures its rows
    show(data)        its table, from what the JSON holds
    plot(data)        its picture, likewise
    answer(data)      one sentence that answers its question, computed from the rows
    main(arguments)   its command

`experiments.lab.report` calls those on `data`, and where there are any those that SUMMARY names.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from experiments.lab import harness
from experiments.lab.harness import Row, console, environment, git, parser, progress, recorded_tables, save
from experiments.lab.plots import Figure, png

Cell = tuple[str, Callable[[], list[Row]]]
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
INTERRUPTED = tuple(128 + number for number in SIGNALS)  # exit codes, as a shell has them
NOT_A_RESULT = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
"""What an experiment raises over the rows of another version, or over what is no result at all."""
Data = dict[str, Any]  # what an experiment's JSON holds: config, environment, rows


class Experiment(Protocol):
    """What is asked of an experiment's module."""

    def cells(self, config: Any) -> Iterable[Cell]: ...

    def show(self, data: Data) -> None: ...

    def plot(self, data: Data) -> Figure: ...

    def answer(self, data: Data) -> str: ...


class Command(Protocol):
    """An experiment's `main`."""

    def __call__(self, arguments: Sequence[str] | None = None) -> None: ...


def command(module: str, config: Any, smoke: Any = None, *, at_once: bool = False) -> Command:
    """Returns the `main` of an experiment without options of its own.

    Args:
        module: the experiment's `__name__`.
        config: what it runs with; with --smoke `smoke`, unless that is None.
    """

    def main(arguments: Sequence[str] | None = None) -> None:
        experiment: Any = sys.modules[module]
        name = Path(experiment.__file__).stem
        given = parser(name, experiment.__doc__).parse_args(arguments)
        run_experiment(
            name, given.out, config if smoke is None or not given.smoke else smoke, experiment, at_once=at_once
        )

    return main


def run_experiment(name: str, out: Path, config: Any, experiment: Experiment, *, at_once: bool = False) -> Path:
    """Measures every cell, writes out/name.json and its picture, and prints table, answer and paths.

    Rows of a cell that has ended are kept in out/name.json.part: interrupted, the same command goes on from there (with
    the same config and the same code; otherwise from the start).

    Args:
        name: of the JSON.
        config: a frozen dataclass; goes into the JSON.
        experiment: its module; the names of its cells differ.
        at_once: whether cells may run beside each other, a process a core: where rows hold counts and virtual time,
            which no neighbour changes. What measures them must pickle.

    Returns the path of the JSON.

    Raises:
        SystemExit: 130 at Ctrl-C, 143 at SIGTERM, 129 at SIGHUP; no process is left behind.
    """
    out.mkdir(parents=True, exist_ok=True)
    wanted = list(experiment.cells(config))
    unfinished = _Unfinished(out / f"{name}.json.part", asdict(config))
    if unfinished.rows:
        console.print(f"{len(unfinished.rows)} of {len(wanted)} parts are there from an interrupted run")
    missing = [cell for cell in wanted if cell[0] not in unfinished.rows]
    with interruptible(), progress(name, len(wanted)) as bar:
        bar.advance(bar.task_ids[0], len(wanted) - len(missing))
        try:
            # closed here, and not when it is collected: an interruption may come while rows are written
            with closing(_beside_each_other(missing) if at_once else _in_turn(missing)) as measured:
                for cell, rows in measured:
                    unfinished.add(cell, rows)
                    bar.advance(bar.task_ids[0])
        except KeyboardInterrupt as stopped:
            with suppress(OSError):  # at SIGHUP there is no screen any more
                bar.stop()
                kept = f"{len(unfinished.rows)} of {len(wanted)} parts are kept"
                console.print(f"interrupted: {kept}; the same command goes on from there")
            raise SystemExit(128 + getattr(stopped, "number", signal.SIGINT)) from None
    path = save(out, name, asdict(config), [row for cell, _ in wanted for row in unfinished.rows[cell]])
    unfinished.path.unlink(missing_ok=True)
    present(path, experiment)
    return path


class Interrupted(KeyboardInterrupt):
    """One of SIGNALS came."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def interruptible() -> Iterator[None]:
    """While the block runs, the first of SIGNALS raises Interrupted; those behind it don't disturb what it undoes.

    What is ignored already (SIGHUP under nohup) stays so. Does nothing outside of the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    taken = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    came = False

    def stop(number: int, _: object) -> None:
        nonlocal came
        if not came:
            came = True
            raise Interrupted(number)

    for number in taken:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])


def _in_turn(cells: Sequence[Cell]) -> Generator[tuple[str, list[Row]]]:
    for cell, measure in cells:
        yield cell, measure()


def _beside_each_other(cells: Sequence[Cell]) -> Generator[tuple[str, list[Row]]]:
    """Yields cells as they end."""
    context = multiprocessing.get_context("spawn")  # a fork would copy the thread of the bar, stopped where it was
    with ProcessPoolExecutor(os.cpu_count(), context, initializer=_be_a_worker) as pool:
        names = {pool.submit(measure): cell for cell, measure in cells}
        try:
            for future in as_completed(names):
                yield names[future], future.result()
        except BaseException:
            for process in multiprocessing.active_children():
                process.kill()
            raise  # a pool that lost a process is broken: leaving it drops what waits and joins the dead


def _be_a_worker() -> None:
    """Leaves signals and the screen to the process that waits for this one, and ends with it, however it ends."""
    for number in SIGNALS:  # they may come to the whole group
        signal.signal(number, signal.SIG_IGN)
    harness.is_silent = True
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker is a child"
    parent.join()
    os._exit(1)  # the main thread is measuring, and would go on


def read_result(path: Path) -> Data:
    """Returns what an experiment's JSON holds.

    Raises:
        ValueError: the file is damaged, or holds no result.
        OSError: it can't be read.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected JSON, got {type(error).__name__}: {error}") from None
    kinds = {"config": dict, "environment": dict, "rows": list}
    for key, kind in kinds.items():
        if not isinstance(data, dict) or not isinstance(data.get(key), kind):
            raise ValueError(f"{path}: expected an object with config, environment and rows, got no {key}")
    told = data["environment"]
    for key, kind in {"time_utc": str, "commit": str, "python": str, "processor": str, "versions": dict}.items():
        if not isinstance(told.get(key), kind):
            raise ValueError(f"{path}: expected environment to tell {key}, got {told.get(key)!r}")
    datetime.fromisoformat(told["time_utc"])
    return {**data, "environment": {"dirty": False, "num_cores": "?", **told}}


def find_result(name: str, out: Path, load: Callable[[], Experiment]) -> Data | str | None:
    """Returns the result in out/name.json; why that is none of this version; or None where there is no such file.

    The experiment (`load` imports it, where there is a file) shows it and answers from it, so that what its rows lack
    comes to light. Prints nothing.
    """
    path = out / f"{name}.json"
    if not path.exists():
        return None
    try:
        data = read_result(path)
        experiment = load()
        with recorded_tables():
            experiment.show(data)
        experiment.answer(data)
    except (OSError, *NOT_A_RESULT) as error:
        return f"{path} is no result of this version: {type(error).__name__}: {error}"
    return data


def present(path: Path, experiment: Experiment) -> None:
    """Prints an experiment's table and answer, and draws its picture, from its JSON."""
    data = read_result(path)
    experiment.show(data)
    console.print(experiment.answer(data), style="bold", highlight=False)
    if harness.is_smoke:
        console.print("(a smoke run: too small for its figures to mean anything)", style="dim")
    console.print(f"{path}\n{draw(path, experiment)}", highlight=False)


def draw(path: Path, experiment: Experiment) -> Path:
    """Draws an experiment's picture beside its JSON, from the JSON alone; returns its path."""
    picture = path.with_suffix(".png")
    picture.write_bytes(png(experiment.plot(read_result(path))))
    return picture


class _Unfinished:
    """The rows of a run under way, by cell, on disk after each."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self.path = path
        self.rows: dict[str, list[Row]] = {}
        # As JSON gives it back: tuples are lists.
        self._of = json.loads(json.dumps({"config": config, "code": _code()}))
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return
        if isinstance(found, dict) and found.get("of") == self._of and isinstance(found.get("cells"), dict):
            self.rows = {cell: rows for cell, rows in found["cells"].items() if isinstance(rows, list)}

    def add(self, cell: str, rows: list[Row]) -> None:
        self.rows[cell] = json.loads(json.dumps(rows))
        written = self.path.with_suffix(".tmp")
        written.write_text(json.dumps({"of": self._of, "cells": self.rows}))
        written.replace(self.path)


def _code() -> list[str]:
    """What tells one state of the code and the machine from another."""
    where = environment()
    new = git("ls-files", "--others", "--exclude-standard")
    changes = hashlib.sha256(f"{git('diff', 'HEAD')}{new}".encode()).hexdigest()
    return [where["commit"], changes, str(where["versions"]), where["processor"]]
