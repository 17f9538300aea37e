"""Tables and the plot of `ablation.py`, from its rows alone."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.harness import Row, pyplot

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


def plot(rows: Sequence[Row], measured: Sequence[Row], path: Path) -> None:
    """Throughput of each variant over that without a cache: each workload's, and what was measured."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(10, 4.6))
    groups = {
        name: [row for row in rows if row["workload"] == name] for name in dict.fromkeys(r["workload"] for r in rows)
    }
    groups["tiny_gpt, measured"] = list(measured)
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    width = 0.8 / len(variants)
    for at, variant in enumerate(variants):
        heights = [next((r["speedup"] for r in group if r["variant"] == variant), 0.0) for group in groups.values()]
        x = np.arange(len(groups)) + (at - len(variants) / 2 + 0.5) * width
        axes.bar(x, heights, width, label=variant)
    axes.set(ylabel="throughput over no cache", xticks=range(len(groups)), xticklabels=list(groups))
    axes.legend(fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.savefig(path)
    plt.close(figure)
