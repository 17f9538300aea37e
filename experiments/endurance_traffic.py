"""Requests that wear an engine out, and a stand-in for its model that fails at times: for `experiments.endurance`."""

from types import SimpleNamespace

import numpy as np
import torch

from radixkv.blocks.kv_manager import BlockCopy
from radixkv.cache.namespace import Salt
from radixkv.engine.engine import Engine
from radixkv.scheduling.batch import ScheduledBatch
from radixkv.scheduling.request import SamplingParams

VOCABULARY = 1000


class NoModel:
    """In place of the runner: the same token for everybody, and each 50th forward pass fails."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(vocab_size=VOCABULARY, max_positions=100_000)
        self.num_calls = 0

    def forward(self, batch: ScheduledBatch) -> torch.Tensor:
        self.num_calls += 1
        if self.num_calls % 50 == 0:
            raise MemoryError("planted")
        logits = torch.zeros(sum(item.needs_logits for item in batch.sequences), VOCABULARY)
        logits[:, 7] = 1.0
        return logits

    def copy(self, copies: list[BlockCopy]) -> None:
        pass


class Traffic:
    """Adds requests and steps, so that about 24 are always under way."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.rng = np.random.default_rng(seed)
        self.shared = self.rng.integers(0, VOCABULARY, (40, 96)).tolist()
        self.num_added = 0

    def serve(self, count: int) -> None:
        """Serves so many requests to their ends."""
        for _ in range(count):
            number, (group, length, own, kind) = (
                self.num_added,
                self.rng.integers(0, (40, 96, VOCABULARY, 100)).tolist(),
            )
            namespace = Salt(f"tenant {number}") if kind < 30 else None
            params = SamplingParams(max_tokens=1 + number % 30, n=1 + 2 * (kind == 99))
            name = self.engine.add_request(
                [*self.shared[group][:length], own, number % 997], params, namespace=namespace
            )
            self.num_added += 1
            if kind == 50:
                self.engine.abort(name)
            if number % 9973 == 9972:
                self.engine.reset_cache(namespace)
            while len(self.engine.generations) >= 24:
                self.engine.step()
        while self.engine.has_unfinished_requests:
            self.engine.step()
