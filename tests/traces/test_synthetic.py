"""Synthetic workloads: reproducible, of the sizes asked for, sharing what they say they share."""

import hashlib
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from radixkv.cache.tokens import num_common_tokens, unpack
from radixkv.traces import WORKLOADS, open_workload
from radixkv.traces.embedded import Embedded
from tests.traces.prefix_trie import reference_hits

RANDOM = [name for name in WORKLOADS if name != "embedded"]
SMALL = {
    "chat": {"num_requests": 20},
    "uniform": {"num_requests": 20},
    "multi_turn": {"num_conversations": 5, "num_turns": 3},
    "few_shot": {"num_requests": 20},
    "tree_of_thought": {"num_problems": 3},
    "agent": {"num_agents": 3, "num_steps": 5, "side_chain_probability": 0.5},
    "document_qa": {"num_documents": 3, "num_questions": 4},
    "self_consistency": {"num_questions": 3, "num_samples": 4},
    "diverge": {"num_groups": 3, "num_requests_per_group": 4},
    "embedded": {"num_documents": 2, "num_conversations": 3, "num_searches": 2, "num_agents": 2},
}


def digest(workload) -> str:
    made = hashlib.sha256()
    for r in workload:
        made.update(repr((r.id, r.session, r.timestamp_s)).encode() + r.prompt + b"|" + r.output)
    return made.hexdigest()


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_same_seed_the_same_bytes(name):
    workload = open_workload(name, seed=3, **SMALL[name])
    requests = list(workload)
    assert digest(workload) == digest(requests) == digest(open_workload(name, seed=3, **SMALL[name]))
    assert digest(workload) != digest(open_workload(name, seed=4, **SMALL[name]))
    assert workload.counts.num_requests == len(requests) > 0
    assert len({r.id for r in requests}) == len(requests)
    assert all(r.num_prompt_tokens >= 1 for r in requests)
    assert requests[:7] == list(open_workload(name, seed=3, limit=7, **SMALL[name]))
    assert list(open_workload(name, limit=0)) == []


@pytest.mark.parametrize("name", ["agent", "embedded"])
def test_the_same_in_every_process(name):
    code = (
        "from radixkv.traces import open_workload\nfrom tests.traces.test_synthetic import *\n"
        f"print(digest(open_workload({name!r}, **SMALL[{name!r}])))"
    )
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "1"}).stdout
    assert out.strip() == digest(open_workload(name, **SMALL[name]))


@pytest.mark.parametrize("name", RANDOM)
def test_vocabulary_and_arrivals(name):
    sizes = SMALL[name] | {"vocab_size": 300}
    plain = list(open_workload(name, **sizes | {"rate_per_s": None}))
    timed = list(open_workload(name, **sizes | {"rate_per_s": 50.0}))
    assert max(unpack(r.prompt).max() for r in plain) < 300
    assert [(r.prompt, r.output) for r in plain] == [(r.prompt, r.output) for r in timed]
    assert all(r.timestamp_s is None for r in plain)
    stamps = [r.timestamp_s for r in timed]
    assert stamps == sorted(stamps) and stamps[0] > 0


def test_arrivals_are_poisson():
    stamps = [r.timestamp_s for r in open_workload("chat", num_requests=4000, rate_per_s=10.0)]
    gaps = np.diff(stamps)
    assert abs(gaps.mean() - 0.1) < 0.01 and abs(gaps.std() - 0.1) < 0.01


def test_a_generator_as_seed_is_drawn_from_once():
    workload = open_workload("uniform", seed=np.random.default_rng(1), num_requests=3)
    assert list(workload) == list(workload)
    assert list(workload) == list(open_workload("uniform", seed=workload.seed, num_requests=3))


def test_chat_shares_the_system_prompt():
    requests = list(open_workload("chat", num_requests=10, system_tokens=100, min_question_tokens=5))
    assert all(num_common_tokens(requests[0].prompt, r.prompt) == 100 for r in requests[1:])


@pytest.mark.parametrize("shared", [0, 1, 1000])
def test_diverge_shares_exactly_what_was_asked(shared):
    requests = list(
        open_workload("diverge", shared_tokens=shared, own_tokens=3, num_groups=4, num_requests_per_group=5)
    )
    for a in requests:
        for b in requests:
            if a is not b:
                assert num_common_tokens(a.prompt, b.prompt) == (shared if a.session == b.session else 0)
    assert [r.id for r in requests[:5]] == ["g0/0", "g1/0", "g2/0", "g3/0", "g0/1"]


def test_uniform_shares_nothing_to_speak_of():
    hits, total = reference_hits(open_workload("uniform", num_requests=100), 1, cache_outputs=True)
    assert hits < 1e-3 * total


def test_conversations_and_agents_grow():
    for name in ("multi_turn", "agent"):
        last = {}
        for r in open_workload(name, **SMALL[name]):
            if r.id.count(".") == 0:
                assert r.prompt.startswith(last.get(r.session, b""))
                last[r.session] = r.prompt + r.output
    side = [r for r in open_workload("agent", **SMALL["agent"]) if "." in r.id]
    assert len(side) % 4 == 0 and side
    assert side[1].prompt.startswith(side[0].prompt + side[0].output)
    assert num_common_tokens(side[0].prompt, side[4].prompt) == 2100


def test_tree_of_thought_builds_on_its_own_thoughts():
    requests = list(open_workload("tree_of_thought", num_problems=1, num_levels=2))
    proposals = [r for r in requests if not r.id.endswith("?")]
    assert len(proposals) == 5 + 10 and len(requests) == 30
    assert len({r.prompt for r in proposals[:5]}) == 1 and len({r.output for r in proposals[:5]}) == 5
    assert any(proposals[5].prompt == proposals[0].prompt + r.output for r in proposals[:5])


def test_self_consistency_repeats_prompts_and_documents_come_first():
    requests = list(open_workload("self_consistency", **SMALL["self_consistency"]))
    assert len({r.prompt for r in requests}) == 3 and len({r.output for r in requests}) == 12
    per_document = Counter(r.session for r in open_workload("document_qa", **SMALL["document_qa"]))
    assert sorted(per_document.values()) == [4, 4, 4]


@pytest.mark.parametrize(
    ("name", "sizes", "reason"),
    [
        ("chatty", {}, "workload: expected one of embedded, chat"),
        ("chat", {"num_documents": 1}, "num_documents: workload 'chat' has no such size; it has rate_per_s, vocab"),
        ("chat", {"num_requests": 0}, "num_requests: expected an integer >= 1, got 0"),
        ("chat", {"system_tokens": 1.5}, "system_tokens: expected an integer"),
        ("chat", {"output_tokens": -1}, "output_tokens: expected an integer >= 0"),
        ("chat", {"min_question_tokens": 9, "max_question_tokens": 8}, "min_question_tokens: expected at most"),
        ("chat", {"rate_per_s": 0.0}, "rate_per_s: expected a positive rate"),
        ("chat", {"vocab_size": 2**31 + 1}, "vocab_size: expected at most"),
        ("few_shot", {"num_chosen_examples": 9}, "num_chosen_examples: expected at most num_pool_examples"),
        ("diverge", {"vocab_size": 15}, "vocab_size: expected at least 16"),
        ("agent", {"side_chain_probability": 2}, "side_chain_probability: expected 0 to 1"),
        ("embedded", {"num_turns": -1}, "num_turns: expected an integer >= 0"),
        ("embedded", {"duration_s": 0}, "duration_s: expected a positive number"),
        ("embedded", {"tokenizer": "words"}, "tokenizer: expected 'bytes'"),
        ("chat", {"seed": -1}, "seed: expected"),
        ("chat", {"limit": 1.5}, "limit: expected"),
    ],
)
def test_bad_arguments(name, sizes, reason):
    with pytest.raises(ValueError, match=reason):
        open_workload(name, **sizes)


def test_embedded_is_real_text_that_caches_differ_on():
    workload = open_workload("embedded")
    requests = list(workload)
    assert 1500 <= len(requests) <= 3000
    assert 2e6 < sum(r.num_prompt_tokens for r in requests) < 1e7
    stamps = [r.timestamp_s for r in requests]
    assert stamps == sorted(stamps)
    assert {r.session.rstrip("0123456789") for r in requests} == {
        *("document", "conversation", "few_shot", "search", "agent")
    }
    to_the_token, _ = reference_hits(requests, 1, cache_outputs=True)
    by_block, total = reference_hits(requests, 64, cache_outputs=True)
    assert 0.5 < by_block / total < to_the_token / total < 0.95
    assert total - by_block > 1.08 * (total - to_the_token)
    for session in ("document0", "conversation0", "agent0"):
        prompts = [workload.tokenizer.decode(r.prompt) for r in requests if r.session == session]
        assert all(prompt.endswith("<|im_start|>assistant\n") for prompt in prompts)


def test_embedded_without_the_language_reference(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.warns(RuntimeWarning, match="lacks pydoc_data"):
        requests = list(open_workload("embedded"))
    assert len(requests) > 1000


def test_embedded_with_nothing_of_it():
    nothing = dict.fromkeys(
        ("num_documents", "num_conversations", "num_few_shot_tasks", "num_searches", "num_agents"), 0
    )
    assert list(Embedded(**nothing).requests(np.random.default_rng(0))) == []


def test_no_torch():
    code = "import sys, radixkv.traces; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
