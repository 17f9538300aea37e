"""SGLang's rules by hand, and against a plainer search."""

import random

import pytest

from radixkv.blocks.sglang_replay import SGLangReplay

PROMPT = list(range(1000))


def test_a_pass_leaves_its_state_at_the_last_multiple_of_64():
    replay = SGLangReplay()
    assert [replay.feed(PROMPT[:n]) for n in (200, 200, 400, 400, 193)] == [0, 192, 192, 384, 192]
    assert replay.num_states == 2
    assert [replay.feed([2000] * n) for n in (63, 63, 64, 65)] == [0, 0, 0, 64]  # under 64 tokens nothing is left


def test_the_second_visitor_of_a_branch_leaves_its_state_there():
    replay = SGLangReplay()
    others = [PROMPT[:200] + [2000 + i] * 300 for i in range(3)]
    assert [replay.feed(prompt) for prompt in others] == [0, 0, 192]
    # What comes after that state is not cached, so the second visitor's own end is not found.
    assert [replay.feed(prompt) for prompt in others] == [448, 192, 448]


def test_without_a_buffer_states_are_at_ends_alone():
    replay = SGLangReplay("no_buffer")
    assert [replay.feed(PROMPT[:n]) for n in (200, 200, 201, 400, 300)] == [0, 0, 200, 201, 201]
    replay = SGLangReplay("no_buffer", budget=100)
    assert [replay.feed(PROMPT[:n]) for n in (250, 250)] == [0, 200]


def test_windows_without_bound_are_hit_as_full_attention_is():
    replay = SGLangReplay("none", page_size=64)
    assert [replay.feed(PROMPT[:n]) for n in (200, 200, 192)] == [0, 192, 128]
    assert replay.num_states == 0


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_prefix_with_a_state_is_found(seed):
    rng = random.Random(seed)
    replay, seen = SGLangReplay("no_buffer", budget=rng.choice([3, 100])), set()
    prompts = [[1]]
    for _ in range(100):
        old = rng.choice(prompts)
        prompt = old[: rng.randrange(len(old) + 1)] + [rng.choice([1, 256, 70_000]) for _ in range(rng.randrange(1, 9))]
        prompts.append(prompt)
        expected = max((n for n in range(len(prompt)) if tuple(prompt[:n]) in seen), default=0)
        assert replay.feed(prompt) == expected
        ends = [*range(expected + replay.budget, len(prompt), replay.budget), len(prompt)]
        seen |= {tuple(prompt[:end]) for end in ends}
        assert replay.num_states == len(seen)


def test_bad_input_is_named():
    assert SGLangReplay().feed([]) == 0
    for arguments, options, message in (
        (["some"], {}, "states: expected one of extra_buffer, no_buffer, none, got 'some'"),
        (["no_buffer"], {"page_size": 64}, "page_size: expected 1 with no_buffer, got 64"),
        ([], {"page_size": 0}, "block_size: expected an int in 1..16384, got 0"),
        ([], {"budget": 0}, "budget: expected an integer >= 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            SGLangReplay(*arguments, **options)
