"""Tables and the plot of `ablation.py`, from its rows alone."""

import json
from pathlib import Path

import numpy as np

from experiments.lab.harness import Row, print_table
from experiments.lab.plots import finish, pyplot
from experiments.lab.run import Data

COLUMNS = {
    "workload": "{workload}",
    "variant": "{variant}",
    "hit rate": "{hit_rate:.1%}",
    "requests/s": "{request_throughput:.1f}",
    "over no cache": "{speedup:.2f}",
    "TTFT p50 ms": "{ttft_p50_ms:.0f}",
    "p99": "{ttft_p99_ms:.0f}",
    "KV shared": "{kv_shared:.2f}",
    "preempted": "{num_preemptions}",
}
MEASURED = {
    "variant": "{variant}",
    "hit rate": "{hit_rate:.1%}",
    "CPU s": "{cpu_s:.2f}",
    "over no cache": "{speedup:.2f}",
}


def show(data: Data) -> None:
    """Prints a line for each workload and variant, and one for each variant that was measured."""
    config = data["config"]
    simulated, measured = _parts(data)
    print_table(f"{config['model']} on {config['gpu']}, simulated", COLUMNS, simulated)
    title = f"tiny_gpt on this CPU, {config['num_measured']} few-shot requests, the same tokens"
    print_table(title, MEASURED, measured)


def _parts(data: Data) -> tuple[list[Row], list[Row]]:
    rows = data["rows"]
    return [r for r in rows if r["part"] == "simulated"], [r for r in rows if r["part"] == "measured"]


def plot(path: Path) -> Path:
    """Draws throughput of each variant over that without a cache: each workload's, and what was measured."""
    simulated, measured = _parts(json.loads(path.read_text()))
    figure, axis = pyplot().subplots(figsize=(10, 4.6))
    names = dict.fromkeys(row["workload"] for row in simulated)
    groups = {name: [row for row in simulated if row["workload"] == name] for name in names}
    groups["tiny_gpt, measured"] = measured
    variants = list(dict.fromkeys(row["variant"] for row in simulated))
    width = 0.8 / len(variants)
    for at, variant in enumerate(variants):
        heights = [next((r["speedup"] for r in group if r["variant"] == variant), 0.0) for group in groups.values()]
        x = np.arange(len(groups)) + (at - len(variants) / 2 + 0.5) * width
        axis.bar(x, heights, width, label=variant)
    axis.set(ylabel="throughput over no cache", xticks=range(len(groups)), xticklabels=list(groups))
    axis.legend(fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return finish(figure, path)


def answer(data: Data) -> str:
    """One sentence: geometric means over the workloads."""
    simulated, _ = _parts(data)

    def mean(variant: str) -> float:
        return float(np.exp(np.mean([np.log(row["speedup"]) for row in simulated if row["variant"] == variant])))

    names = ("flat hash (no tree)", "radix, first come", "radix, longest prefix", "+ ageing", "+ tree attention")
    told = ", ".join(f"{mean(name):.2f} with {name.removeprefix('+ ')}" for name in names)
    return f"Throughput over no cache, geometric mean of the workloads: {told} and all before."
