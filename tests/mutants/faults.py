"""Faults to plant, each with the tests that are to notice. A `find` stands exactly once in all of radixkv/."""

from typing import NamedTuple

SCRIPTS = ("tests/test_shadow_engine.py::test_random_scripts",)
MANAGER = ("tests/test_kv_manager.py", "-k", "not every_row_read")
ISOLATION = ("tests/test_isolation.py",)


class Fault(NamedTuple):
    name: str
    find: str
    replace: str
    tests: tuple[str, ...] = SCRIPTS


FAULTS = [
    # ---- matching
    Fault("a match is not pinned", "        tree.pin(node)\n        lease = Lease(", "        lease = Lease("),
    Fault(
        "the source of a copy is not pinned",
        "                tree.pin(source)\n",
        "",
    ),
    Fault(
        "a pinned leaf stays in the order of eviction",
        "            self.leave_leaves(node)\n        while True:\n            node.pins += 1\n",
        "            pass\n        while True:\n            node.pins += 1\n",
    ),
    Fault("a release does not unpin", "        self.tree.unpin(node, stamp=stamp)\n", "        pass\n"),
    Fault(
        "off by one: the last token is matched too",
        "self.cache.acquire(packed[:-TOKEN_BYTES], ",
        "self.cache.acquire(packed, ",
        ("tests/test_kv_manager.py::test_at_least_one_token_is_computed",),
    ),
    Fault(
        "what this very step computes is copied from",
        "        return self.fresh < self.num_blocks\n",
        "        return True\n",
    ),
    Fault(
        "an advance keeps the partial match behind it",
        "  # it continued the old end\n            self._drop_partial(sequence, first)",
        "\n            pass",
        MANAGER,
    ),
    # ---- tails
    Fault(
        "a stale tail: the wrong block",
        "Tail(rest, int(sequence.block_table[leased]))",
        "Tail(rest, int(sequence.block_table[-1]))",
    ),
    Fault(
        "a tail with a token that was never computed",
        "num_left = max(sequence.num_computed - first, 0)",
        "num_left = max(sequence.num_tokens - first, 0)",
    ),
    Fault(
        "a fuller block does not replace a tail",
        "        if node.children:\n            self._supersede(node.tail_before(span))\n",
        "",
    ),
    # ---- namespaces
    Fault(
        "a namespace is dropped at admission",
        "self.cache.acquire(packed[:-TOKEN_BYTES], namespace)",
        "self.cache.acquire(packed[:-TOKEN_BYTES], None)",
    ),
    Fault(
        "a namespace is dropped when publishing",
        "            key = self._interner.mark(key, lease.namespace, lease.num_tokens, add=add)\n",
        "            pass\n",
    ),
    Fault(
        "the type of a namespace is forgotten",
        "pair = (replace(part, start=0), token)",
        "pair = (repr(part)[-4:], token)",
    ),
    Fault(
        "all of a namespace but its first part is ignored",
        "        for part in parts(namespace):\n            at = ",
        "        for part in parts(namespace)[:1]:\n            at = ",
    ),
    # ---- steps
    Fault(
        "what a failed step published stays",
        "        return _joined(self.tree.withdraw())\n",
        "        self.commit()\n        return NO_BLOCKS\n",
    ),
    Fault("a failed step does not cut leases back", "            self._cut_back(lease)\n", "            pass\n"),
    Fault("a failed step loses a sequence's own blocks", "log.kept(leased)]", "NO_BLOCKS]"),
    Fault("a failed step frees nothing that it took", "            self.allocator.free(log.to_free(leased))\n", ""),
    Fault(
        "a duplicate's own block is never freed",
        "for log in self._step.values():\n            for own in log.replaced:",
        "for log in ():\n            for own in log.replaced:",
    ),
    Fault(
        "a fork copies a row too few",
        "len(packed) // TOKEN_BYTES - i * self.cache.block_size)",
        "len(packed) // TOKEN_BYTES - i * self.cache.block_size - 1)",
    ),
    Fault(
        "sequences that fail alone are not withdrawn",
        "            except Exception as error:\n                self.scheduler.withdraw()\n",
        "            except Exception as error:\n",
    ),
    # ---- scheduling
    Fault(
        "a sequence of this step is preempted", "[other for other in later if other.step != self.step]", "list(later)"
    ),
    Fault(
        "a preempted sequence believes its KV is there",
        "        sequence.num_computed = sequence.target = 0\n",
        "        sequence.target = 0\n",
    ),
    Fault(
        "the KV of a decoded token is not written", "if end % stride == 0 else end - 1", "if end % stride == 0 else end"
    ),
    Fault(
        "a block is written that is somebody else's",
        "return max(start, first + self.manager.publish(",
        "return max(start, 0 * self.manager.publish(",
    ),
    Fault(
        "a step counts as computed before it has run",
        "        sequence.step, sequence.target = self.step, end\n",
        "        sequence.step, sequence.target = self.step, end\n        sequence.num_computed = end\n",
    ),
    # ---- resets
    Fault(
        "who ran before a reset publishes after it (radix)",
        "kinds(lease.namespace))\n        given_up: list[int] = []",
        "kinds(lease.namespace)) and False\n        given_up: list[int] = []",
    ),
    Fault(
        "who ran before a reset publishes after it (flat)",
        "kinds(lease.namespace))\n        forgotten = ",
        "kinds(lease.namespace)) and False\n        forgotten = ",
    ),
    Fault("a fork of who ran before a reset publishes", "        lease.is_stale = is_stale\n", "", ISOLATION),
    Fault(
        "what was forgotten becomes evictable, and found",
        "        if node.is_forgotten:\n            self.superseded",
        "        if False:\n            self.superseded",
    ),
    Fault(
        "a tenant's blocks survive his reset (flat)",
        "        self._parts_of.keep(ids, cursor.parts, len(cursor.blocks))\n",
        "",
    ),
    # ---- the flat hash
    Fault(
        "a hash without what came before",
        "parent = self._map.hash_of[cursor.blocks[-1]] if cursor.blocks else self._hasher.seed",
        "parent = self._hasher.seed",
    ),
    Fault(
        "colliding hashes are believed",
        "block = next((b for b in block_map.all(block_hash) if self[b].follows(parent, tokens, keys)), None)",
        "block = next((b for b in block_map.all(block_hash)), None)",
    ),
    # ---- the engine
    Fault(
        "an abort ends a later request of that id",
        "if self._generations.get(generation.request.request_id) is generation:",
        "if self._generations.get(generation.request.request_id) is not None:",
        ("tests/test_fault_injection.py::test_an_abort_that_comes_too_late",),
    ),
    Fault(
        "sampling that fails takes others' numbers",
        "            for sample, state in zip(every, states, strict=True):\n                _restore(sample, state)\n",
        "            pass\n",
        ("tests/test_fault_injection.py", "-k", "sampling_that_fails"),
    ),
    Fault(
        "copies run in the first layer alone",
        "layers = np.arange(self.config.num_layers, dtype=np.int64)",
        "layers = np.arange(1, dtype=np.int64)",
        ("tests/model/test_runner.py",),
    ),
    Fault(
        "slots are off by one",
        "blocks.astype(np.int64) * self.block_size + positions % self.block_size",
        "blocks.astype(np.int64) * self.block_size + (positions + 1) % self.block_size",
        ("tests/model/test_runner.py",),
    ),
    # ---- tenants
    Fault(
        "a cap gives up blocks of a step under way",
        "            if node.fresh:\n                fresh.append(heappop(heap))\n                continue\n",
        "",
        ("tests/cache/test_caps.py",),
    ),
    Fault(
        "a watch outlives what was forgotten",
        "                self.watches.cut(node, node.parent)\n        self._detach(top)",
        "                pass\n        self._detach(top)",
        ("tests/cache/test_watch.py",),
    ),
    # ---- rows that share their bits
    Fault(
        "rows of a product are not cut as measured",
        "    if len(pieces) == 1:\n        return _WAYS[rule.way(padded)]",
        "    if True:\n        return _WAYS[0]",
        ("tests/model/test_row_linear.py",),
    ),
    Fault(
        "a size is computed the wrong way about",
        "        out.copy_(_WAYS[rule.way(part.shape[0])](aligned(part), weight, bias))\n",
        "        out.copy_(_WAYS[0](aligned(part), weight, bias))\n",
        ("tests/model/test_row_linear.py",),
    ),
    Fault(
        "rows without a rule are computed all the same",
        "            linear_rule(*shape).require()\n",
        "            linear_rule(*shape)\n",
        ("tests/model/test_invariance.py", "-k", "nothing_agrees"),
    ),
    Fault(
        "attention without a rule is computed all the same",
        "        attention_row_rule(self.weights.embedding.dtype, self.config.head_dim).require()\n",
        "",
        ("tests/model/test_invariance.py", "-k", "without_a_rule"),
    ),
    Fault(
        "a change of threads is not noticed",
        'type != "cpu" or settings() == self._checked:',
        'type != "cpu" or self._checked is not None:',
        ("tests/model/test_invariance.py", "-k", "nothing_agrees"),
    ),
    Fault(
        "weights begin anywhere",
        "weights.mapped(row_linear.aligned)",
        "weights.mapped(lambda weight: weight)",
        ("tests/model/test_invariance.py", "-k", "aligned"),
    ),
]
