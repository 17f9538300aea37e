"""Every experiment by name, in the order in which a reader wants them."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Entry:
    """One experiment.

    Attributes:
        name: its module in this package, and its JSON.
        part: of the report.
        seconds: that it takes on two cores as the report runs it; with --smoke under thirty.
        report: arguments with which the report runs it.
    """

    name: str
    part: str
    seconds: int
    report: tuple[str, ...] = ()

    @property
    def question(self) -> str:
        return _docstring(self.name).partition("\n")[0]

    @property
    def expectation(self) -> str:
        """The paragraphs of the docstring after the question, without the commands."""
        paragraphs = _docstring(self.name).partition("\n")[2].strip().split("\n\n")
        return "\n\n".join(text for text in paragraphs if not text.startswith("    "))

    @property
    def command(self) -> str:
        return " ".join(("python -m experiments", self.name, *self.report))

    def load(self) -> Any:
        """Imports its module; some load torch."""
        return import_module(f"experiments.{self.name}")


def _docstring(name: str) -> str:
    """A module's docstring, without importing it."""
    source = (Path(__file__).parents[1] / f"{name}.py").read_text()
    return ast.get_docstring(ast.parse(source)) or ""


PREFIXES = "What a prefix cache buys"
INDEX = "What the index costs"
SERVING = "In an engine"
POLICIES = "Which next, and which goes"
FLEET = "Many replicas"
GROWTH = "Growth and leaks"
KERNELS = "Attention"

ENTRIES = (
    Entry("compare", PREFIXES, 15),
    Entry("work_savings", PREFIXES, 1),
    Entry("system_prompt", PREFIXES, 1),
    Entry("break_prefix", PREFIXES, 1),
    Entry("divergence", PREFIXES, 20),
    Entry("workload_worth", PREFIXES, 6),
    Entry("index_cost", INDEX, 18),
    Entry("hash_choice", INDEX, 2),
    Entry("overhead", INDEX, 15, ("--repeats", "1")),
    Entry("chat", SERVING, 80, ("--rates", "4", "8")),
    Entry("prefix_memory", SERVING, 5),
    Entry("timing_channel", SERVING, 20),
    Entry("publish_timing", SERVING, 1),
    Entry("evict_or_preempt", SERVING, 2),
    Entry("tree_serving", SERVING, 45),
    Entry("calibrate", SERVING, 37),
    Entry("cache_aware_scheduling", POLICIES, 65),
    Entry("eviction", POLICIES, 90),
    Entry("ablation", POLICIES, 34),
    Entry("hit_rate_effect", POLICIES, 12),
    Entry("routing", FLEET, 100, ("--short",)),
    Entry("route_cost", FLEET, 3),
    Entry("load", GROWTH, 13, ("--nodes", "250000")),
    Entry("endurance", GROWTH, 7, ("--smoke",)),
    Entry("kernel_bench", KERNELS, 35, ("--context", "2048", "--patience", "10")),
    Entry("tree_bytes", KERNELS, 6),
    Entry("plan_time", KERNELS, 3),
    Entry("tree_attention", KERNELS, 75, ("--patience", "6")),
    Entry("gpu_kernels", KERNELS, 1),
)


def find(name: str) -> Entry | None:
    """Returns the experiment of that name."""
    return next((entry for entry in ENTRIES if entry.name == name), None)
