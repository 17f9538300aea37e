"""What the tree of a hybrid model finds is what a plain set of prefixes finds, whatever the layers and the pool."""

import random

import pytest

from radixkv.blocks.hybrid_manager import HybridManager
from radixkv.blocks.pages import OutOfPages
from radixkv.cache.hybrid.cache import HybridCache
from radixkv.cache.hybrid.placements import DEFAULT_PLACEMENT
from radixkv.cache.hybrid.retentions import RETENTIONS
from radixkv.cache.layers import CELL, FullAttention, Recurrent, Window
from tests.blocks.hybrid_oracle import PrefixSet

MODELS = {
    "windows": (FullAttention(8), Window(8, 20), Window(8, 20), Window(8, 70)),
    "states": (FullAttention(8), Recurrent(300, 5), Recurrent(300, 5)),
    "both": (FullAttention(8), FullAttention(8), Window(4, 33), Recurrent(400, 6)),
}
NUM_RUNS = 1000
NUM_OPERATIONS = 30


def prefix_of(cache, checkpoint):
    """The tokens before a checkpoint of the tree."""
    node, tail = cache._checkpoints._places[checkpoint]
    tokens, _ = cache.kv.path(node)
    border = checkpoint.position // cache.block_size * cache.block_size
    whole = tokens[: 4 * border] + tail
    return tuple(int.from_bytes(whole[i : i + 4], "little") for i in range(0, len(whole), 4))


class ToldCache(HybridCache):
    """Notes the prefixes that each eviction takes, and those that it leaves in their place."""

    def evict(self, shorten=None):
        before = {prefix_of(self, each) for each in self._checkpoints}
        pinned = {prefix_of(self, each) for each in self._checkpoints if each.pins}
        oldest = min((each.last_use for each in self._checkpoints if not each.pins), default=None)
        last_use = {prefix_of(self, each): each.last_use for each in self._checkpoints}
        given_up = super().evict(shorten)
        after = {prefix_of(self, each) for each in self._checkpoints}
        gone, new = before - after, after - before
        assert not gone & pinned
        assert (given_up is None) == (before == pinned)
        if given_up is not None:
            (lost,) = gone
            assert len(new) <= 1 and all(lost[: len(p)] == p and len(p) == len(lost) // CELL * CELL for p in new)
            assert self.retention.name != "recency" or last_use[lost] == oldest
        self.oracle.prefixes = self.oracle.prefixes - gone | new
        self.num_shortened += len(new)
        return given_up


class Run:
    """Requests that begin, compute a chunk, and end, in any order; both sides compared after each."""

    def __init__(self, seed, layers):
        rng = self.random = random.Random(seed)
        size = rng.choice([1, 4, 16, 64, 24])
        placement = rng.choice([DEFAULT_PLACEMENT, "branch+end", "grid+branch", "end", "before_end+branch"])
        retention = rng.choice(sorted(RETENTIONS))
        self.cache = ToldCache(layers, size, placement=placement, retention=retention)
        self.cache.oracle = self.oracle = PrefixSet(placement, size)
        self.cache.num_shortened = 0
        num_bytes = rng.choice([6_000, 20_000, 100_000, None])
        self.manager = HybridManager(self.cache, num_bytes, page_bytes=rng.choice([None, 16, 100]))
        self.running = {}  # sequence -> [prompt, stops left]
        self.texts = [()]
        self.num_hits = self.num_refused = 0
        self.alphabet = rng.choice([1, 2, 5])

    def prompt(self):
        text = self.random.choice(self.texts)
        text = text[: self.random.randint(0, len(text))]
        text += tuple(self.random.randrange(self.alphabet) for _ in range(self.random.choice([1, 3, 20, 90, 300])))
        self.texts.append(text)
        del self.texts[:-12]
        return text

    def begin(self):
        prompt = self.prompt()
        found, shared, stops = self.oracle.visit(prompt)
        sequence = self.manager.begin(list(prompt))
        lease = sequence.lease
        assert (lease.num_tokens, lease.num_shared) == (len(found), shared)
        assert dict(sorted((lease.stops | lease.poor_stops).items())) == stops
        assert not lease.poor_stops or self.manager.pool.num_pages is not None
        self.num_hits += len(found)
        ends = sorted({*lease.stops, len(prompt)})
        self.running[sequence] = [prompt, ends]

    def compute(self):
        if not self.running:
            return
        sequence, entry = self.random.choice(list(self.running.items()))
        prompt, ends = entry
        if not ends:
            return
        end = ends[0]
        try:
            self.manager.grow(sequence, end)
        except OutOfPages:
            self.num_refused += 1
            self.end(sequence)
            return
        del ends[0]
        if end in sequence.lease.stops:
            is_new = self.manager.publish(sequence, list(prompt), end)
            assert is_new == (prompt[:end] not in self.oracle.prefixes)
            self.oracle.prefixes.add(prompt[:end])
            self.oracle.passed.add(prompt)
            self.manager.commit()

    def end(self, sequence=None):
        if not self.running:
            return
        sequence = sequence or self.random.choice(list(self.running))
        prompt, _ = self.running.pop(sequence)
        self.oracle.passed.add(prompt)
        self.manager.end(sequence)

    def check(self):
        self.manager.check()
        assert {prefix_of(self.cache, each) for each in self.cache._checkpoints} == self.oracle.prefixes
        held = [entry[0][: sequence.lease.kv.num_tokens] for sequence, entry in self.running.items()]
        assert self.cache.kv.tree.num_blocks == len(self.oracle.kv_blocks(held))

    def run(self):
        for _ in range(NUM_OPERATIONS):
            self.random.choices([self.begin, self.compute, self.end], [3, 6, 2])[0]()
            self.check()
        while self.running:
            self.end()
            self.check()
        return self


def compare(seeds, layers):
    runs = [Run(seed, layers).run() for seed in seeds]
    assert sum(run.num_hits for run in runs) > 0
    assert sum(run.num_refused for run in runs) > 0
    assert sum(run.cache.num_evicted for run in runs) > 0
    return runs


@pytest.mark.parametrize("model", MODELS)
def test_hits_are_those_of_a_set_of_prefixes(model):
    compare(range(12), MODELS[model])


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_hits_are_those_of_a_set_of_prefixes_in_a_thousand_runs(model):
    runs = compare(range(100, 100 + NUM_RUNS), MODELS[model])
    shortened = sum(run.cache.num_shortened for run in runs)
    assert (shortened > 0) == (model == "states")
