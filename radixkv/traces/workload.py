"""Synthetic workloads by name: a registry of configs, and the same interface that a trace has."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np

from radixkv.traces.embedded import Embedded
from radixkv.traces.flat_shapes import Chat, Diverge, DocumentQA, FewShot, SelfConsistency, Uniform
from radixkv.traces.growing_shapes import Agent, MultiTurn, TreeOfThought
from radixkv.traces.problems import ReadCounts
from radixkv.traces.request import TraceRequest
from radixkv.traces.synthetic import SyntheticConfig
from radixkv.traces.tokenizers import Tokenizer, load_tokenizer
from radixkv.traces.trace import check_limit

WorkloadConfig = SyntheticConfig | Embedded

WORKLOADS: dict[str, type[SyntheticConfig] | type[Embedded]] = {
    "embedded": Embedded,
    "chat": Chat,
    "uniform": Uniform,
    "multi_turn": MultiTurn,
    "few_shot": FewShot,
    "tree_of_thought": TreeOfThought,
    "agent": Agent,
    "document_qa": DocumentQA,
    "self_consistency": SelfConsistency,
    "diverge": Diverge,
}


def open_workload(
    name: str, *, seed: int | np.random.Generator = 0, limit: int | None = None, **sizes: Any
) -> "Workload":
    """Sets up a workload.

    Args:
        name: a key of WORKLOADS.
        seed: the same seed gives the same bytes in every process; a Generator is drawn from once, here.
        limit: yield at most so many requests.
        sizes: fields of the workload's config, such as `shared_tokens`.

    Raises:
        ValueError: unknown name or size (the message lists what there is), or a size out of range.
    """
    if name not in WORKLOADS:
        raise ValueError(f"workload: expected one of {', '.join(WORKLOADS)}, got {name!r}")
    check_limit(limit)
    config_type = WORKLOADS[name]
    known = [field.name for field in fields(config_type)]
    for size in sizes:
        if size not in known:
            raise ValueError(f"{size}: workload {name!r} has no such size; it has {', '.join(known)}")
    if isinstance(seed, np.random.Generator):
        seed = int(seed.integers(2**63))
    if type(seed) is not int or seed < 0:
        raise ValueError(f"seed: expected an integer >= 0 or a numpy Generator, got {seed!r}")
    return Workload(name, config_type(**sizes), seed, limit)


class Workload:
    """The requests of a config and a seed; every `iter` generates them from the start.

    Attributes:
        name: its key in WORKLOADS.
        config: its sizes.
        seed: what its generator starts from.
        formats: empty; a trace has its files' formats here.
        tokenizer: what made the tokens of real text; None where tokens are random numbers.
        tokens: the tokenizer's name, or "random".
        caveats: none.
        sharing_known: always True.
        counts: what the latest iteration met, growing while it goes on.
    """

    def __init__(self, name: str, config: WorkloadConfig, seed: int, limit: int | None) -> None:
        self.name, self.config, self.seed = name, config, seed
        self.formats: tuple[str, ...] = ()
        self.tokenizer: Tokenizer | None = load_tokenizer(config.tokenizer) if isinstance(config, Embedded) else None
        self.tokens = self.tokenizer.name if self.tokenizer else "random"
        self.caveats: tuple[str, ...] = ()
        self.sharing_known = True
        self.counts = ReadCounts()
        self._limit = limit

    def __iter__(self) -> Iterator[TraceRequest]:
        """Yields the requests in order of arrival."""
        counts = self.counts = ReadCounts()
        if self._limit == 0:
            return
        for request in self.config.requests(np.random.default_rng(self.seed)):
            counts.num_requests += 1
            yield request
            if counts.num_requests == self._limit:
                return
