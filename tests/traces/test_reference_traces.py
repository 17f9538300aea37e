"""Real traces give the hits that an independent program computed for them.

The traces lie beside the repository (`../shared/traces`) and are no part of it: without them these tests are skipped.
"""

import pytest

from radixkv.traces import open_trace
from tests.shared_files import SHARED
from tests.traces.prefix_trie import PrefixTrie

TRACES = SHARED / "traces"
BLOCK_SIZES = (1, 16, 64)

pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason=f"no traces in {TRACES}")

# name: requests, prompt tokens, hits at block sizes 1, 16, 64 with prompts cached, then with outputs cached too
BYTES = {
    "tau_bench_airline": (2454, 28631325, (26966419, 26948080, 26889984), (27626363, 27608080, 27553088)),
    "mtbench101": (4208, 2512949, (1162200, 1130464, 1027776), (2049567, 2017808, 1918016)),
    "mini_swe_agent": (402, 12222426, (11412711, 11409664, 11400320), (11593093, 11589968, 11581120)),
    "bbh_3shot": (1620, 5152641, (4651148, 4638560, 4606464), (4651148, 4638560, 4606464)),
    "loogle_shortdep": (80, 6836190, (6396529, 6395952, 6394176), (6396529, 6395952, 6394176)),
    "tot_game24": (10609, 7106455, (7072063, 7022288, 6573440), (7072063, 7022288, 6573440)),
}
QWEN3_RATES = {
    "tau_bench_airline": (0.9273, 0.9248, 0.9173),
    "mtbench101": (0.4577, 0.4028, 0.2867),
    "mini_swe_agent": (0.9326, 0.9316, 0.9286),
    "bbh_3shot": (0.9011, 0.8919, 0.8672),
    "loogle_shortdep": (0.9357, 0.9354, 0.9344),
    "tot_game24": (0.9945, 0.9690, 0.9212),
}


def hits_of(name: str, tokenizer: str, *, cache_outputs: bool) -> tuple[int, int, tuple[int, ...]]:
    """Returns requests, prompt tokens, and the hits of an infinite cache at each of BLOCK_SIZES."""
    (path,) = TRACES.glob(f"{name}.*")
    trie = PrefixTrie()
    num_requests = total = 0
    hits = [0] * len(BLOCK_SIZES)
    for request in open_trace(path, tokenizer=tokenizer):
        common = min(trie.longest_then_insert(request.prompt), request.num_prompt_tokens - 1)
        if cache_outputs:
            trie.longest_then_insert(request.prompt + request.output)
        hits = [hit + common // size * size for hit, size in zip(hits, BLOCK_SIZES, strict=True)]
        num_requests, total = num_requests + 1, total + request.num_prompt_tokens
    return num_requests, total, tuple(hits)


@pytest.mark.parametrize("name", ["mtbench101", "mini_swe_agent", "bbh_3shot"])
def test_exact_hits_of_small_traces(name):
    num_requests, total, _, with_outputs = BYTES[name]
    assert hits_of(name, "bytes", cache_outputs=True) == (num_requests, total, with_outputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", BYTES)
def test_exact_hits(name):
    num_requests, total, prompts_only, with_outputs = BYTES[name]
    assert hits_of(name, "bytes", cache_outputs=False) == (num_requests, total, prompts_only)
    assert hits_of(name, "bytes", cache_outputs=True) == (num_requests, total, with_outputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", QWEN3_RATES)
def test_rates_with_a_real_vocabulary(name):
    pytest.importorskip("quicktok")
    _, total, hits = hits_of(name, "qwen3", cache_outputs=False)
    assert tuple(round(hit / total, 4) for hit in hits) == QWEN3_RATES[name]


@pytest.mark.slow
def test_rates_with_outputs_and_a_real_vocabulary():
    pytest.importorskip("quicktok")
    _, total, hits = hits_of("mtbench101", "qwen3", cache_outputs=True)
    assert tuple(round(hit / total, 4) for hit in hits) == (0.8167, 0.7562, 0.6114)


def test_mooncake_shares_its_blocks():
    requests = open_trace(TRACES / "mooncake_conversation.jsonl")
    trie = PrefixTrie()
    num_requests = hits = total = 0
    for request in requests:
        full = request.num_prompt_tokens // 512 * 512
        hits += min(trie.longest_then_insert(request.prompt[: 4 * full]), request.num_prompt_tokens - 1)
        num_requests, total = num_requests + 1, total + request.num_prompt_tokens
    assert num_requests == 12031
    assert round(hits / total, 3) == 0.373


def test_azure_shares_nothing():
    trace = open_trace(TRACES / "azure_llm_conv.csv")
    trie = PrefixTrie()
    assert not trace.sharing_known
    assert all(trie.longest_then_insert(request.prompt) == 0 for request in trace)
    assert trace.counts.num_requests == 19366
