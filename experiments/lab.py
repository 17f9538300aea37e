"""How an experiment is run: cell by cell, the rows of each kept as they come, and shown from the file alone.

An experiment is a module with a docstring (question, expectation, command), one frozen config, and::

    cells(config)     its cells: a name, and what measures its rows
    show(data)        its table, from what the JSON holds
    plot(path)        its picture beside the JSON, from the JSON
    answer(data)      one sentence that answers its question, computed from the rows

`experiments.report` and `python -m experiments` call the last three and know nothing else of it.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from experiments import harness
from experiments.harness import Row, console, environment, git, progress, save

Cell = tuple[str, Callable[[], list[Row]]]
INTERRUPTED = 130  # exit code, as a shell has it of SIGINT
Data = dict[str, Any]  # what an experiment's JSON holds: config, environment, rows


class Experiment(Protocol):
    """What is asked of an experiment's module."""

    def show(self, data: Data) -> None: ...

    def plot(self, path: Path) -> Path: ...

    def answer(self, data: Data) -> str: ...


def conduct(
    name: str, out: Path, config: Any, cells: Iterable[Cell], experiment: Experiment, *, at_once: bool = False
) -> Path:
    """Measures every cell, writes out/name.json and its picture, and prints table, answer and paths.

    Rows of a cell that has ended are kept in out/name.json.part: interrupted, the same command goes on from there (with
    the same config and the same code; otherwise from the start).

    Args:
        config: a frozen dataclass; goes into the JSON.
        cells: names that differ, and what returns the rows of each.
        at_once: whether cells may run beside each other, a process a core: where rows hold counts and virtual time,
            which no neighbour changes. What measures them must pickle.

    Returns the path of the JSON.

    Raises:
        SystemExit: 130, at Ctrl-C.
    """
    out.mkdir(parents=True, exist_ok=True)
    wanted = list(cells)
    unfinished = _Unfinished(out / f"{name}.json.part", asdict(config))
    if unfinished.rows:
        console.print(f"{len(unfinished.rows)} of {len(wanted)} parts are there from an interrupted run")
    missing = [cell for cell in wanted if cell[0] not in unfinished.rows]
    with progress(name, len(wanted)) as bar:
        bar.advance(bar.task_ids[0], len(wanted) - len(missing))
        try:
            for cell, rows in _beside_each_other(missing) if at_once else _in_turn(missing):
                unfinished.add(cell, rows)
                bar.advance(bar.task_ids[0])
        except KeyboardInterrupt:
            bar.stop()
            kept = f"{len(unfinished.rows)} of {len(wanted)} parts are kept"
            console.print(f"interrupted: {kept}; the same command goes on from there")
            raise SystemExit(INTERRUPTED) from None
    path = save(out, name, asdict(config), [row for cell, _ in wanted for row in unfinished.rows[cell]])
    unfinished.path.unlink(missing_ok=True)
    present(path, experiment)
    return path


def _in_turn(cells: Sequence[Cell]) -> Iterator[tuple[str, list[Row]]]:
    for cell, measure in cells:
        yield cell, measure()


def _beside_each_other(cells: Sequence[Cell]) -> Iterator[tuple[str, list[Row]]]:
    """Yields cells as they end."""
    context = multiprocessing.get_context("spawn")  # a fork would copy the thread of the bar, stopped where it was
    with ProcessPoolExecutor(os.cpu_count(), context, initializer=_be_a_worker) as pool:
        names = {pool.submit(measure): cell for cell, measure in cells}
        try:
            for future in as_completed(names):
                yield names[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
                process.join()
            raise


def _be_a_worker() -> None:
    """Leaves Ctrl-C and the screen to the process that waits for this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    harness.is_silent = True


def present(path: Path, experiment: Experiment) -> None:
    """Prints an experiment's table and answer, and draws its picture, from its JSON."""
    data = json.loads(path.read_text())
    experiment.show(data)
    console.print(experiment.answer(data), style="bold", highlight=False)
    if harness.is_smoke:
        console.print("(a smoke run: too small for its figures to mean anything)", style="dim")
    console.print(f"{path}\n{experiment.plot(path)}", highlight=False)


class _Unfinished:
    """The rows of a run under way, by cell, on disk after each."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self.path = path
        self.rows: dict[str, list[Row]] = {}
        # As JSON gives it back: tuples are lists.
        self._of = json.loads(json.dumps({"config": config, "code": _code()}))
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError):
            return
        if isinstance(found, dict) and found.get("of") == self._of:
            self.rows = found["cells"]

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
