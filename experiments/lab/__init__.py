"""The lab: what every experiment is run, kept, listed, drawn and reported by.

An experiment imports its names from here; docs/adding_an_experiment.md shows one.
"""

from experiments.lab.catalog import Entry
from experiments.lab.harness import (
    Cells,
    Row,
    console,
    environment,
    fail,
    grouped,
    parser,
    print_table,
    progress,
    resident_bytes,
    save,
)
from experiments.lab.plots import Figure, bars, draw_bars, draw_lines, png, pyplot
from experiments.lab.run import Cell, Data, command, draw, present, run_experiment

__all__ = [
    "Cell",
    "Cells",
    "Data",
    "Entry",
    "Figure",
    "Row",
    "bars",
    "command",
    "console",
    "draw",
    "draw_bars",
    "draw_lines",
    "environment",
    "fail",
    "grouped",
    "parser",
    "png",
    "present",
    "print_table",
    "progress",
    "pyplot",
    "resident_bytes",
    "run_experiment",
    "save",
]
