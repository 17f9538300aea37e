"""What every experiment shares: where it ran, results as JSON, tables, progress, the look of the plots."""

import argparse
import json
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

try:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
except ImportError as error:
    raise ImportError(f"the experiments need {error.name}: pip install 'radixkv[experiments]'") from error

console = Console()
if console.width < 132:
    console = Console(width=132)  # a table with its columns squeezed away says nothing; let the terminal wrap

Row = dict[str, Any]


def grouped(rows: Iterable[Row], *fields: str) -> dict[Any, list[Row]]:
    """Returns rows by the value of a field, or by the tuple of several fields' values; in the order of appearance."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        values = tuple(row[field] for field in fields)
        groups.setdefault(values if len(fields) > 1 else values[0], []).append(row)
    return groups


def environment() -> Row:
    """Returns what a figure depends on besides its config: commit, versions, machine, UTC time."""
    packages = ("radixkv", "torch", "triton", "numpy", "sortedcontainers")
    return {
        "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git("rev-parse", "--short", "HEAD") or "unknown",
        "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        "python": platform.python_version(),
        "versions": {name: found for name in packages if (found := _version(name))},
        "machine": platform.machine(),
        "processor": _processor(),
        "num_cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),  # above num_cores, other work disturbed the times
        "device": "cpu",
    }


def git(*arguments: str) -> str:
    """Returns what a git command prints in this checkout; nothing where it fails, as in an installed package."""
    here = Path(__file__).parent
    try:
        done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""  # not a checkout
    return done.stdout.strip()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def resident_bytes() -> int:
    """Returns what of this process is in memory; off Linux, the most that was."""
    if not Path("/proc/self/statm").exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def save(out: Path, name: str, config: Mapping[str, Any], rows: Sequence[Row], **more: Any) -> Path:
    """Writes out/name.json with config, environment, rows, and more; whole or not at all. Returns its path."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.json"
    unfinished = path.with_suffix(".json.part")
    unfinished.write_text(
        json.dumps({"config": config, "environment": environment(), "rows": rows, **more}, indent=1) + "\n"
    )
    unfinished.replace(path)
    return path


@dataclass(frozen=True)
class Cells:
    """A table as text."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def is_text(self, column: int) -> bool:
        """Whether a column holds words, which stand flush left."""
        return any(re.search("^[a-z]|[a-z]{3}", row[column], re.IGNORECASE) for row in self.rows)


_recorded: list[Cells] | None = None


@contextmanager
def recorded_tables() -> Iterator[list[Cells]]:
    """While the block runs, tables are collected in the list and not printed."""
    global _recorded
    before, _recorded = _recorded, []
    try:
        yield _recorded
    finally:
        _recorded = before


def print_table(title: str, columns: Mapping[str, str], rows: Iterable[Row], notes: Sequence[str] = ()) -> None:
    """Prints rows as a table.

    Args:
        columns: heading -> a format of the row's fields, such as "{hit_rate:.1%}".
        notes: lines to stand below it.
    """
    texts = tuple(tuple(form.format(**row) for form in columns.values()) for row in rows)
    cells = Cells(title, tuple(columns), texts, tuple(notes))
    if _recorded is not None:
        _recorded.append(cells)
        return
    console.print(f"\n{title}", style="bold", highlight=False, markup=False)  # a table's own title wraps at its width
    table = Table(header_style="bold", box=SIMPLE, padding=(0, 1))
    for column, heading in enumerate(columns):
        justify: Literal["left", "right"] = "left" if cells.is_text(column) else "right"
        table.add_column(heading, justify=justify, no_wrap=True, overflow="fold")
    for texts_of_row in texts:
        table.add_row(*texts_of_row)
    console.print(table)
    for note in notes:
        console.print(f"  {note}", highlight=False, markup=False)


is_silent = False  # whether another process has the screen


@contextmanager
def progress(title: str, total: int | None) -> Iterator[Progress]:
    """Shows a bar while the block runs; `bar.advance(bar.task_ids[0])` moves it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    screen = Console(stderr=True)
    with Progress(*columns, console=screen, transient=True, refresh_per_second=4, disable=is_silent) as bar:
        bar.add_task(title, total=total)
        yield bar


is_smoke = False  # whether the experiment under way was asked to be small


class _Smoke(argparse.Action):
    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        global is_smoke
        namespace.smoke = is_smoke = True


def parser(name: str, description: str | None, files: str = "") -> argparse.ArgumentParser:
    """Returns an experiment's parser: its docstring as help, and where its results go."""
    files = files or f"{name}.json and {name}.png"
    made = argparse.ArgumentParser(
        prog=f"python -m experiments.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--out", type=Path, default=Path("results"), metavar="DIR", help=f"gets {files} (results)")
    size = made.add_mutually_exclusive_group()
    size.add_argument(
        "--smoke", action=_Smoke, nargs=0, default=False, help="small sizes, under half a minute, to see that it runs"
    )
    size.add_argument("--full", action="store_true", help="the largest sizes, where there are larger ones")
    return made


def fail(message: str) -> None:
    """Ends the script with a message and exit code 2, as argparse does."""
    print(f"{Path(sys.argv[0]).stem}: error: {message}", file=sys.stderr)
    raise SystemExit(2)
