"""What the tree tells an observer is all that happens: from it alone a copy of the tree is kept, span by span."""

import random
from functools import partial

import pytest

from radixkv.cache.contract import PartialBlock
from radixkv.cache.namespace import Salt
from radixkv.cache.radix.cache import RadixCache
from radixkv.cache.radix.observer import TreeObserver
from radixkv.cache.radix.policies import POLICIES
from tests.cache.conftest import RandomRun


class Copy(TreeObserver):
    """A checkpoint at the end of each node, and which nodes are pinned, from what is told alone.

    A checkpoint is the node's path at the moment in which its end was reached: all later splits, merges and cuts must
    leave it where it is, or tell that it is gone.
    """

    def __init__(self, cache):
        self.tree = cache.tree
        self.ends = {}  # node: the packed tokens from the root to its end
        self.pinned_nodes = set()
        self.num_told = dict.fromkeys(["grew", "split", "merged", "trimmed", "removed", "pinned", "unpinned"], 0)
        cache.tree.attach(self)

    def grew(self, node, num_bytes, first_block):
        self.num_told["grew"] += 1
        above = self.ends.get(node, b"")
        new = []
        if len(node.span) > num_bytes:
            assert node.span[num_bytes:].startswith(first_block)
            self.ends[node] = above = above + node.span[num_bytes:]
        else:
            assert first_block in node.children
        while node.children and (
            children := [c for c in node.children.values() if c not in self.ends and c.num_uncommitted]
        ):
            (node,) = children
            above += node.span
            self.ends[node] = above
            self.pinned_nodes.add(node)
            new.append(node)
        assert all(each.pins for each in new)

    def split(self, upper, lower):
        self.num_told["split"] += 1
        assert upper not in self.ends and lower.parent is upper
        if lower not in self.ends:  # a partial block has one block, and is never split
            raise AssertionError("a node that was not told of is split")
        self.ends[upper] = self.ends[lower][: len(self.ends[lower]) - len(lower.span)]
        if lower in self.pinned_nodes:
            self.pinned_nodes.add(upper)

    def merged(self, upper, lower):
        self.num_told["merged"] += 1
        assert self.ends.pop(upper) == self.ends[lower][: lower.start * 4 + len(upper.span)]
        assert (upper in self.pinned_nodes) == (lower in self.pinned_nodes)
        self.pinned_nodes.discard(upper)

    def trimmed(self, node, num_blocks):
        self.num_told["trimmed"] += 1
        self.ends[node] = self.ends[node][: -num_blocks * self.tree.width]

    def removed(self, node):
        self.num_told["removed"] += 1
        assert node.parent is not None
        self.ends.pop(node, None)  # of partial blocks nothing is told before
        self.pinned_nodes.discard(node)

    def pinned(self, node):
        self.num_told["pinned"] += 1
        assert node not in self.pinned_nodes
        self.pinned_nodes.add(node)

    def unpinned(self, node):
        self.num_told["unpinned"] += 1
        self.pinned_nodes.discard(node)
        if node not in self.ends:
            assert len(node.span) < self.tree.width  # a partial block is told of when it is unpinned

    def check(self):
        nodes, paths = [self.tree.root], {self.tree.root: b""}
        for node in nodes:
            for child in node.children.values():
                paths[child] = paths[node] + child.span
            nodes.extend(node.children.values())
        whole = [node for node in nodes[1:] if len(node.span) >= self.tree.width]
        assert self.ends.keys() == set(whole)
        assert all(self.ends[node] == paths[node] for node in whole)
        assert self.pinned_nodes & set(whole) == {node for node in whole if node.pins}


class ObservedRun(RandomRun):
    """Random operations with partial matches and partial blocks, the copy compared after each."""

    def __init__(self, cache, seed):
        super().__init__(cache, seed, num_blocks=60)
        self.copy = Copy(cache)

    def check(self):
        super().check()
        self.copy.check()

    def run(self, num_operations):
        for index in range(num_operations):
            super().run(1)
            if index % 50 == 49:
                self.reset()
                self.check()
        return self


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("caps", [None, 3])
def test_a_copy_kept_from_what_is_told_is_the_tree(policy, caps):
    told = dict.fromkeys(["grew", "split", "merged", "trimmed", "removed", "pinned", "unpinned"], 0)
    for seed in range(12):
        cache = RadixCache(2, partial_blocks=False, policy=policy, tenant_caps=caps)
        run = ObservedRun(cache, seed)
        if caps is not None:  # dead blocks are held until they are evicted
            run.check = partial(evict_dead_and_check, run)
        run.run(200)
        told = {name: told[name] + number for name, number in run.copy.num_told.items()}
        run.finish()
    assert min(told.values()) > 0, told


def evict_dead_and_check(run):
    run.free += run.cache.evict(run.cache.num_dead_blocks).tolist()
    ObservedRun.check(run)


@pytest.mark.parametrize("policy", ["lru", "fifo"])
def test_partial_blocks_come_and_go_without_a_trace(policy):
    rng = random.Random(3)
    cache = RadixCache(4, policy=policy)
    copy, block, texts, held = Copy(cache), 0, [[]], []
    for _ in range(600):
        text = rng.choice(texts)
        text = text[: rng.randint(0, len(text))] + [rng.randrange(2) for _ in range(rng.randint(0, 9))]
        texts = [*texts[-10:], text]
        namespace = rng.choice([None, Salt("a", start=3)])
        lease = cache.acquire(text, namespace)
        rest = text[lease.num_tokens :]
        cache.insert(lease, rest, range(block, block + len(rest) // 4))
        block += len(rest) // 4
        if rng.random() < 0.2:
            cache.withdraw()
        else:
            cache.commit()
        held.append((lease, text))
        copy.check()
        while len(held) > rng.randrange(5):
            lease, text = held.pop(rng.randrange(len(held)))
            left = text[lease.num_tokens :][:3]
            cache.release(lease, PartialBlock(left, block) if left else None)
            block += 1
        cache.evict(max(cache.sizes.evictable - 12, 0))
        cache.check()
        copy.check()
    assert min(copy.num_told.values()) > 5


def test_an_observer_that_is_detached_is_told_nothing():
    cache = RadixCache(1)
    copy = Copy(cache)
    watch = cache.watch([1, 2, 3])
    assert len(cache.tree.observers) == 2
    cache.unwatch(watch)
    assert cache.tree.observers == (copy,) and cache.tree.deferral is None
    cache.tree.detach(copy)
    cache.insert(cache.acquire([]), [1, 2], [1, 2])
    assert not cache.tree.observers and not any(copy.num_told.values())
