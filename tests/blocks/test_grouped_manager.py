"""Models of several groups by vLLM's rules: each rule by hand, all of them against a plainer model."""

import random

import pytest

from radixkv.blocks.allocator import OutOfBlocks
from radixkv.blocks.grouped_manager import GroupedKVManager
from radixkv.blocks.grouped_replay import GroupedReplay
from radixkv.cache.flat_hash.grouped import GroupedHashCache
from radixkv.cache.flat_hash.groups import GroupLayout
from radixkv.cache.layers import FullAttention, Recurrent, Window
from radixkv.cache.namespace import Salt
from tests.blocks.grouped_model import GroupedModel

FULL = FullAttention(1)


def layout(groups, block_size, unit=None):
    """One layer a group: "full", "state", or a window's number of tokens; equal ones stand together."""
    layers = []
    for kind in groups:
        if kind == "full":
            layers.append(FULL)
        elif kind == "state":
            layers.append(Recurrent(block_size, 0))
        else:
            layers.append(Window(1, kind))
    return GroupLayout.of(tuple(layers), block_size=block_size, match_unit=unit)


def replay(groups, block_size, unit=None, num_blocks=None, budget=8192):
    return GroupedReplay(layout(groups, block_size, unit), num_blocks, budget=budget)


def passes(replay, prompt):
    """The ends of the forward passes of a prompt, the hit first."""
    sequence = replay.manager.begin(prompt)
    ends = [sequence.num_computed]
    while sequence.num_computed < sequence.num_tokens:
        ends.append(replay.manager.compute(sequence, replay.budget))
    replay.manager.end(sequence)
    replay.manager.check()
    return ends


def free_list(replay):
    """All blocks that are in no table, the next to be taken first."""
    return [*replay.manager.allocator.free_ids().tolist(), *replay.manager._queue.unpinned()]


PROMPT = list(range(100))


def test_full_attention_alone_is_the_flat_hash():
    cache = replay(["full"], 4)
    assert [cache.feed(PROMPT[:n]) for n in (10, 10, 12, 13, 8)] == [0, 8, 8, 12, 4]


def test_a_state_is_kept_where_the_last_whole_block_before_the_end_ends():
    cache = replay(["state", "full"], 8)
    assert passes(cache, PROMPT[:29]) == [0, 24, 29]
    assert passes(cache, PROMPT[:29]) == [24, 29]
    assert passes(cache, PROMPT[:25]) == [24, 25]
    # At 24 tokens the last has to be computed, and at 16 there is a state only since this request passed.
    assert passes(cache, PROMPT[:24]) == [0, 16, 24]
    assert passes(cache, PROMPT[:24]) == [16, 24]


def test_a_prompt_shorter_than_a_block_never_hits():
    cache = replay(["state", "full"], 8)
    assert [cache.feed(PROMPT[:8]) for _ in range(3)] == [0, 0, 0]
    assert cache.cache.num_cached_blocks == 3  # blocks of full attention that no state goes with
    assert [cache.feed(PROMPT[:7]) for _ in range(3)] == [0, 0, 0]


def test_the_second_visitor_of_a_branch_leaves_a_state_there():
    cache = replay(["state", "full"], 8)
    others = [PROMPT[:20] + [200 + i] * 30 for i in range(3)]
    assert passes(cache, others[0]) == [0, 48, 50]
    assert passes(cache, others[1]) == [0, 16, 48, 50]  # full attention matches 16: the junction
    assert passes(cache, others[2]) == [16, 48, 50]


def test_fine_mode_hits_inside_a_block():
    cache = replay(["state", "full"], 8, unit=2)
    assert passes(cache, PROMPT[:21]) == [0, 16, 20, 21]
    assert passes(cache, PROMPT[:21]) == [20, 21]
    assert passes(cache, PROMPT[:30]) == [20, 24, 28, 30]  # to the end of the block first
    assert passes(cache, PROMPT[:19]) == [16, 18, 19]


def test_fine_mode_copies_what_it_hits_inside_a_block():
    cache = replay(["state", "full"], 8, unit=2)
    cache.feed(PROMPT[:6])  # a pass to 4, one to 6: two blocks of states, one of full attention
    assert cache.cache.num_cached_blocks == 2
    sequence = cache.manager.begin(PROMPT[:6])
    assert sequence.num_cached_tokens == 4
    sources = [table[-1] for table in sequence.tables]
    cache.manager.compute(sequence, 100)
    assert all(table[-1] not in sources for table in sequence.tables)
    cache.manager.end(sequence)
    assert cache.feed(PROMPT[:6]) == 4


def test_windows_match_where_their_last_blocks_are():
    cache = replay([7, "full"], 4)  # six tokens before: two blocks
    assert passes(cache, PROMPT[:30]) == [0, 30]
    assert cache.cache.num_cached_blocks == 7 + 2
    assert passes(cache, PROMPT[:30]) == [28, 30]
    assert passes(cache, PROMPT[:26]) == [0, 26]  # ends at 24, before which the window has one block
    assert passes(cache, PROMPT[:26]) == [24, 26]


def test_the_second_visitor_of_a_branch_leaves_a_window_there():
    cache = replay([7, "full"], 4)
    others = [PROMPT[:20] + [200 + i] * 30 for i in range(3)]
    assert [cache.feed(prompt) for prompt in others] == [0, 0, 20]


def test_a_window_from_the_first_block_on_is_enough():
    cache = replay([100, "full"], 4)
    assert [cache.feed(PROMPT[:n]) for n in (30, 30, 10)] == [0, 28, 8]


def test_a_window_of_one_token_needs_nothing():
    cache = replay([1, "full"], 4)
    assert [cache.feed(PROMPT[:n]) for n in (30, 30, 10)] == [0, 28, 8]


def test_a_hit_is_where_all_kinds_go_on():
    cache = replay(["state", "full", 7], 4)
    assert passes(cache, PROMPT[:31]) == [0, 28, 31]
    # States at 28 alone; full attention reaches 32 and a window too. What parts at 22 finds nothing.
    assert passes(cache, PROMPT[:22] + [300] * 20) == [0, 20, 40, 42]
    assert passes(cache, PROMPT[:22] + [400] * 20) == [20, 40, 42]
    cache = replay(["state", "full", 7], 4, unit=2)
    assert cache.cache.layout.match_unit == 4  # windows do not go together with hits inside blocks


def test_what_a_window_has_passed_is_given_back_between_passes():
    cache = replay([5, "full"], 4, budget=8)
    sequence = cache.manager.begin(PROMPT[:30])
    for end, held in ((8, [True, True]), (16, [False, True, True, True]), (24, [False] * 3 + [True] * 3)):
        assert cache.manager.compute(sequence, 8) == end
        assert [block is not None for block in sequence.tables[0]] == held
    cache.manager.end(sequence)
    cache.manager.check()


def test_a_state_before_the_last_is_given_back_between_passes():
    cache = replay(["state", "full"], 4, budget=8)
    sequence = cache.manager.begin(PROMPT[:30])
    for end, held in ((8, [False, True]), (16, [False, True, False, True]), (24, [False] * 3 + [True, False, True])):
        assert cache.manager.compute(sequence, 8) == end
        assert [block is not None for block in sequence.tables[0]] == held
    cache.manager.end(sequence)
    cache.manager.check()


def test_one_free_list():
    cache = replay(["state", "full"], 4, num_blocks=8)
    cache.feed(PROMPT[:9])
    # States 0 (at 8, kept) and 3 (at 9), blocks 1, 2 and 4: full ones of full attention, and the last token's.
    # What has no hash comes first, that of the group that gave back last before the others.
    assert free_list(cache) == [4, 3, 5, 6, 7, 0, 2, 1]
    cache.feed([200] * 9)
    # Took 4 (a state), 3 and 5; then 6 (a state) and 7.
    assert free_list(cache) == [7, 6, 0, 2, 1, 4, 5, 3]
    assert cache.num_evicted_blocks == 0
    cache.feed([300] * 9)
    assert cache.num_evicted_blocks == 3
    assert cache.feed([200] * 9) == 8


def test_a_prompt_that_does_not_fit_is_refused():
    cache = replay(["state", "full"], 4, num_blocks=6)
    assert cache.feed(PROMPT[:13]) == 0
    assert cache.feed(PROMPT[:40]) == 0
    assert cache.num_refused_requests == 1
    cache.manager.check()
    assert cache.feed(PROMPT[:13]) == 12
    sequence = cache.manager.begin(PROMPT[:40])
    with pytest.raises(OutOfBlocks, match="7 blocks wanted, 2 of 6 are free"):
        cache.manager.compute(sequence, 8192)
    cache.manager.end(sequence)
    cache.manager.check()


def test_a_prompt_that_does_not_fit_leaves_the_order_of_eviction():
    cache = replay(["full"], 2, num_blocks=4)
    for prompt in (PROMPT[:2], [200, 201], [300, 301]):
        cache.feed(prompt)
    before = free_list(cache)
    assert cache.feed(PROMPT[:50]) == 0  # hits the first block, and does not fit
    assert cache.num_refused_requests == 1
    assert free_list(cache) == before


def test_without_full_attention_the_first_kind_has_the_junction():
    cache = replay([5, "state"], 2)
    others = [PROMPT[:3] + [200 + i] * 6 for i in range(2)]
    assert passes(cache, PROMPT[:5]) == [0, 4, 5]  # leaves windows from the first block on, and a state at 4
    assert passes(cache, others[0]) == [0, 2, 8, 9]
    assert passes(cache, others[1]) == [2, 8, 9]


def test_namespaces_are_kept_apart():
    cache = replay(["state", "full"], 4)
    assert [cache.feed(PROMPT[:9], space) for space in (None, Salt("a"), Salt("a"), None)] == [0, 0, 8, 8]


def test_prompts_take_turns():
    cache = replay(["state", "full"], 4, budget=4)
    first, second = (cache.manager.begin(prompt) for prompt in (PROMPT[:10], [200] * 10))
    while first.num_computed < 10:
        cache.manager.compute(first, 4)
        cache.manager.compute(second, 4)
    cache.manager.end(first)
    cache.manager.check()
    cache.manager.end(second)
    cache.manager.check()
    assert [cache.feed(prompt) for prompt in (PROMPT[:10], [200] * 10)] == [8, 8]


def test_bad_input_is_named():
    manager = GroupedKVManager(GroupedHashCache(layout(["full"], 4)))
    with pytest.raises(ValueError, match="token_ids: expected at least one, got none"):
        manager.begin([])
    sequence = manager.begin([1, 2])
    with pytest.raises(ValueError, match="budget: expected an integer >= 1, got 0"):
        manager.compute(sequence, 0)
    manager.compute(sequence, 2)
    with pytest.raises(ValueError, match="sequence: expected tokens left to compute, got all 2 computed"):
        manager.compute(sequence, 2)
    assert GroupedReplay(layout(["full"], 4)).feed([]) == 0


KINDS = (
    ["full"],
    ["state", "full"],
    ["full", "state", "state"],
    ["full", "full", "state"],
    [3, "full"],
    [6, 6, "full"],
    [6, 10, "full"],
    ["full", 9, "state"],
    [9, "state"],
    ["state", 5, 12],
    ["state"],
    [5],
)


@pytest.mark.parametrize("seed", [*range(20), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(20, 400))])
def test_random_prompts_against_the_plain_model(seed):
    rng = random.Random(seed)
    groups = KINDS[seed % len(KINDS)]
    is_fine = "state" in groups and all(kind in ("state", "full") for kind in groups)
    block_size = rng.choice([2, 4, 6])
    unit = rng.choice([u for u in (1, 2, 3) if block_size % u == 0]) if is_fine else block_size
    num_blocks, budget = rng.randrange(10, 80), rng.choice([block_size, 3 * block_size + 1, 40])
    cache = replay(groups, block_size, unit, num_blocks, budget)
    model = GroupedModel(groups, block_size, cache.cache.layout.match_unit, num_blocks)
    prompts = [(0,)]
    for _ in range(40):
        old = rng.choice(prompts)
        prompt = old[: rng.randrange(len(old) + 1)] + tuple(rng.randrange(3) for _ in range(rng.randrange(1, 15)))
        prompts.append(prompt)
        num_passes, num_refused = cache.num_passes, cache.num_refused_requests
        hit = cache.feed(prompt)
        expected = model.serve(prompt, budget)
        if expected is None:
            assert cache.num_refused_requests == num_refused + 1
        else:
            assert (hit, cache.num_passes - num_passes) == expected
        cache.manager.check()
        assert cache.num_evicted_blocks == model.num_evicted
        assert free_list(cache) == model.free
        assert cache.cache.num_cached_blocks == len({block for *_, block in model.registered})
