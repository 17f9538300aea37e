"""One page of all results, from the JSON alone: question, answer, picture, table, command and machine of each."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from experiments.lab.catalog import PARTS, Entry, entries
from experiments.lab.harness import Cells, recorded_tables
from experiments.lab.plots import dark_plots, png
from experiments.lab.run import NOT_A_RESULT, Data, find_result

Found = Mapping[str, Data | str | None]  # by experiment: its result, or why its file holds none, or no file
SUMMARY = {
    "buys": "What it buys over the flat hash",
    "worth": "Over which workloads",
    "costs": "At what price",
}
"""What the page says first: an experiment with a function of such a name, `buys(data)`, yields sentences or tables."""

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2330; --paper: #fff; --faint: #5d667a; --line: #d9dde6; --panel: #f5f7fa;
  --mark: #2457c5; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9f0; --paper: #14171e; --faint: #9aa4b8; --line: #303644;
  --panel: #1b1f29; --mark: #86aefb; } }
* { box-sizing: border-box; }
body { font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0; }
main, header { max-width: 62rem; margin: 0 auto; padding: 1rem 1.25rem; }
h1 { font-size: 1.7rem; margin: 1rem 0 .3rem; } h2 { font-size: 1.25rem; margin: 2.5rem 0 .5rem; }
h3 { font-size: 1.05rem; margin: 2rem 0 .3rem; }
a { color: var(--mark); }
nav ul { columns: 16rem; padding-left: 1.1rem; margin: .3rem 0; } nav li { break-inside: avoid; }
.answer { font-weight: 600; margin: .3rem 0 .8rem; } .faint { color: var(--faint); font-size: .88rem; }
section.summary { background: var(--panel); border-radius: 8px; padding: .2rem 1.2rem 1rem; }
img { max-width: 100%; height: auto; border: 1px solid var(--line); border-radius: 6px; }
.table { overflow-x: auto; } table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
.caption { color: var(--faint); font-size: .88rem; margin: .9rem 0 .1rem; }
th, td { padding: .2rem .7rem .2rem 0; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th.text, td.text { text-align: left; }
code { font: .85rem ui-monospace, monospace; background: var(--panel); padding: .1rem .35rem; border-radius: 4px;
  overflow-wrap: anywhere; }
details summary { cursor: pointer; color: var(--mark); }
"""
_LONG = 24  # rows of a table before it is folded
_MANY = 4  # notes below one


def write_report(out: Path) -> Path:
    """Writes out/report.html: one file that asks for nothing else. Returns its path.

    What has no JSON in `out` is listed as not run; a damaged JSON, or one of another version, as no result, with the
    reason. Cost: two plots an experiment.
    """
    path = out / "report.html"
    found = {entry.name: find_result(entry.name, out, entry.load) for entry in entries()}
    parts = [*_head(), *_summary(found), *_navigation(found)]
    for part, members in groupby(entries(), key=lambda entry: entry.part):
        parts.append(f"<h2>{escape(PARTS[part])}</h2>")
        for entry in members:
            parts += _experiment(entry, found[entry.name])
    parts.append("</main></body></html>\n")
    path.write_text("\n".join(parts), encoding="utf-8")
    return path


def _head() -> Iterator[str]:
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield '<link rel="icon" href="data:,">'
    yield f"<title>radixkv: results</title><style>{_STYLE}</style></head><body>"
    yield "<header><h1>radixkv: what a radix tree of token spans buys</h1>"
    yield '<p class="faint">Every figure comes from the command beside it, on the machine named there.</p></header>'
    yield "<main>"


def _summary(found: Found) -> Iterator[str]:
    """What radix buys over the flat hash, over which workloads, at what price; then the answers of all that was run."""
    results = [(entry, data) for entry in entries() if isinstance(data := found[entry.name], dict)]
    yield '<section class="summary" id="summary"><h2>In short</h2>'
    for function, heading in SUMMARY.items():
        told = [line for entry, data in results for line in _told(entry, function, data)]
        yield from (f"<h3>{heading}</h3>", *told) if told else ()
    yield "<h3>Every answer</h3><ul>"
    for entry, data in results:
        yield f'<li><a href="#{entry.name}">{entry.name}</a>: {escape(entry.load().answer(data))}</li>'
    yield "</ul></section>"


def _told(entry: Entry, function: str, data: Data) -> Iterator[str]:
    """What one experiment adds to a part of the summary; nothing where it has no such function."""
    try:
        for part in getattr(entry.load(), function, lambda data: ())(data):
            yield from _table(part) if isinstance(part, Cells) else (f"<p>{escape(part)}</p>",)
    except NOT_A_RESULT as error:
        why = escape(f"{entry.name}: {type(error).__name__}: {error}")
        yield f'<p class="faint">These results do not tell it: {why}</p>'


def _navigation(found: Found) -> Iterator[str]:
    yield '<nav aria-label="Experiments"><h2>Experiments</h2><ul>'
    for entry in entries():
        data = found[entry.name]
        why = "" if isinstance(data, dict) else "(not run)" if data is None else "(no result of this version)"
        missing = why and f' <span class="faint">{why}</span>'
        yield f'<li><a href="#{entry.name}">{entry.name}</a>{missing}</li>'
    yield "</ul></nav>"


def _experiment(entry: Entry, data: Data | str | None) -> Iterator[str]:
    yield f'<section id="{entry.name}"><h3>{escape(entry.question)}</h3>'
    if isinstance(data, str):
        yield f'<p class="faint">{escape(data)}. Anew: <code>{escape(entry.command)}</code></p></section>'
        return
    if data is None:
        yield f'<p class="faint">Not run here: <code>{escape(entry.command)}</code></p></section>'
        return
    module = entry.load()
    answer = module.answer(data)
    yield f'<p class="answer">{escape(answer)}</p>'
    try:
        light, dark = _pictures(module, data)
    except NOT_A_RESULT as error:
        yield f'<p class="faint">No picture of this result: {escape(f"{type(error).__name__}: {error}")}</p>'
    else:
        yield f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        yield f'<img src="{light}" alt="{escape(f"{entry.name}: {answer}")}"></picture>'
    with recorded_tables() as tables:
        module.show(data)
    for table in tables:
        yield from _table(table)
    yield f'<p class="faint"><code>{escape(entry.command)}</code>{_other_sizes(entry)}</p>'
    yield "<details><summary>What was expected, and where it ran</summary>"
    yield "".join(f"<p>{_prose(paragraph)}</p>" for paragraph in entry.expectation.split("\n\n"))
    yield f'<p class="faint">{escape(_where(data["environment"]))}</p>'
    yield f'<p class="faint">Config: <code>{escape(json.dumps(data["config"]))}</code></p></details></section>'


def _other_sizes(entry: Entry) -> str:
    return f": shortened; all of it: <code>python -m experiments {entry.name}</code>" if entry.report else ""


def _prose(text: str) -> str:
    """What docstrings have in backticks becomes code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _where(environment: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    commit = environment["commit"] + (" with changes" if environment["dirty"] else "")
    machine = f"{environment['processor']}, {environment['num_cores']} cores"
    if "load_average" in environment:
        machine += f", load {environment['load_average']} at the end"
    return f"{environment['time_utc']}, commit {commit}; {machine}; Python {environment['python']}, {versions}"


def _table(table: Cells) -> Iterator[str]:
    is_long = len(table.rows) > _LONG
    if is_long:
        yield f"<details><summary>{escape(table.title)}: {len(table.rows)} rows</summary>"
    else:
        yield f'<p class="caption">{escape(table.title)}</p>'
    sides = [' class="text"' if table.is_text(column) else "" for column in range(len(table.headings))]
    yield f'<div class="table" tabindex="0"><table aria-label="{escape(table.title)}"><thead><tr>'
    cells = zip(table.headings, sides, strict=True)
    yield "".join(f'<th scope="col"{side}>{escape(heading)}</th>' for heading, side in cells)
    yield "</tr></thead><tbody>"
    for row in table.rows:
        yield (
            "<tr>" + "".join(f"<td{side}>{escape(cell)}</td>" for cell, side in zip(row, sides, strict=True)) + "</tr>"
        )
    yield "</tbody></table></div>"
    if notes := [note for note in table.notes if note]:
        lines = f'<p class="faint">{"<br>".join(map(escape, notes))}</p>'
        yield f"<details><summary>In words</summary>{lines}</details>" if len(notes) > _MANY else lines
    if is_long:
        yield "</details>"


def _pictures(module: Any, data: Data) -> tuple[str, str]:
    """Draws a result light and dark; returns both as data URIs."""
    light = _uri(png(module.plot(data)))
    with dark_plots():
        return light, _uri(png(module.plot(data)))


def _uri(picture: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"
