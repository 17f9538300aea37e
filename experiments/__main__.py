"""Lists the experiments, or runs one.

python -m experiments                       every experiment: its question, its time, what it last found
python -m experiments NAME [options]        runs one; NAME --help tells its options
python -m experiments --smoke               runs all of them at their smallest
python -m experiments --report              runs what has no results yet, and writes results/report.html
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.padding import Padding
from rich.text import Text

from experiments.lab import harness
from experiments.lab.catalog import PARTS, entries, find
from experiments.lab.harness import console, fail
from experiments.lab.run import INTERRUPTED, find_result


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    names = [entry.name for entry in entries()]
    if given and not given[0].startswith("-"):
        entry = find(given[0])
        if entry:
            entry.load().main(given[1:])
        else:
            fail(f"NAME: expected one of {', '.join(names)}, got {given[0]!r}")
        return
    options = argparse.ArgumentParser(
        prog="python -m experiments", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--out", type=Path, default=Path("results"), metavar="DIR", help="where results are (results)")
    what = options.add_mutually_exclusive_group()
    what.add_argument("--smoke", action="store_true", help="run all of them at their smallest, into DIR/smoke")
    what.add_argument("--report", action="store_true", help="run what has no results in DIR, and write DIR/report.html")
    options.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help="these alone, of them")
    options.add_argument("--again", action="store_true", help="with --report: run all of them anew")
    chosen = options.parse_args(given)
    if chosen.smoke:
        run_all(chosen.only, chosen.out / "smoke", smoke=True, again=True)
    elif chosen.report:
        from experiments.lab.report import write_report

        run_all(chosen.only, chosen.out, smoke=False, again=chosen.again)
        console.print(write_report(chosen.out), highlight=False)
    else:
        list_all(chosen.out)


def run_all(names: Sequence[str], out: Path, *, smoke: bool, again: bool) -> None:
    """Runs the experiments one after the other, each as its command would.

    Raises:
        SystemExit: 1 at the end where one failed; the others have run.
    """
    failed = []
    for number, entry in enumerate(entries(), 1):
        if entry.name not in names:
            continue
        if not again:
            found = find_result(entry.name, out, entry.load)
            if isinstance(found, str):
                console.print(f"{found}; it is run anew", style="red", markup=False, highlight=False)
            elif found is not None:
                continue
        console.rule(f"{number} of {len(entries())}: {entry.name}", align="left")
        started, worked = time.perf_counter(), cpu_s()
        harness.is_smoke = False  # the one before may have been one
        options = ("--smoke",) if smoke else entry.report
        try:
            entry.load().main([*options, "--out", str(out)])
        except SystemExit as error:
            if error.code in INTERRUPTED:
                raise
            failed.append(entry.name)
        except Exception as error:
            console.print(f"{entry.name} failed: {type(error).__name__}: {error}", style="red", markup=False)
            failed.append(entry.name)
        console.print(f"{time.perf_counter() - started:.0f} s, {cpu_s() - worked:.0f} s of CPU time", style="dim")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def cpu_s() -> float:
    """Returns the CPU seconds of this process, and of those that it waited for."""
    return sum(os.times()[:4])


def list_all(out: Path) -> None:
    """Prints each experiment's question, the time it takes and what it last found in `out`."""
    part = ""
    for entry in entries():
        if entry.part != part:
            part = entry.part
            console.print(f"\n{PARTS[part]}", style="bold")
        console.print(f"  {entry.name}", style="cyan", end="")
        console.print(f"  {entry.question}  [{_minutes(entry.seconds)}]", highlight=False, markup=False)
        found = find_result(entry.name, out, entry.load)
        if isinstance(found, dict):
            ended = datetime.fromisoformat(found["environment"]["time_utc"])
            found = f"{_ago((datetime.now(UTC) - ended.astimezone()).total_seconds())}: {entry.load().answer(found)}"
        if found is not None:
            console.print(Padding(Text(found, style="dim"), (0, 0, 0, 6)))
    console.print("\npython -m experiments NAME runs one, NAME --help tells its options; --smoke is the smallest size")


def _minutes(seconds: int) -> str:
    return f"{seconds} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _ago(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return "just now"


if __name__ == "__main__":
    main()
