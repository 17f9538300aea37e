"""The tree of a trace as people see it, and why a prompt does not hit."""

import json
from html.parser import HTMLParser

import numpy as np
import pytest

from radixkv.blocks.config import CacheConfig
from radixkv.blocks.replay import Replay
from radixkv.cache.namespace import Salt, parts
from radixkv.cache.radix.cache import RadixCache
from radixkv.cache.tokens import pack
from radixkv.inspect import compare_prompts, survey, to_html
from radixkv.inspect.__main__ import main
from radixkv.inspect.survey import Passage, token_list
from radixkv.traces import load_tokenizer


def served(prompts, block_size=1, num_blocks=None):
    """Replays (tokens, namespace) pairs; returns the cache and their passages."""
    replay = Replay(CacheConfig("radix", block_size, num_blocks=num_blocks))
    packed = [(pack(tokens), namespace) for tokens, namespace in prompts]
    passages = [Passage(tokens, replay.feed(tokens, b"", namespace), namespace) for tokens, namespace in packed]
    return replay.cache, passages


@pytest.mark.parametrize("block_size", [1, 3])
def passes(passage, span, path, namespace):
    """Whether a prompt goes through a span or ends in it, said without any tree."""
    num_prompt = len(passage.prompt) // 4
    num_tokens = min(num_prompt, span.start + span.num_tokens)
    carried, held = (
        tuple(part for part in parts(n) if part.start < num_tokens) for n in (passage.namespace, namespace)
    )
    return num_tokens > span.start and passage.prompt[: 4 * num_tokens] == path[: 4 * num_tokens] and carried == held


def test_counts_are_those_of_brute_force():
    rng = np.random.default_rng(1)
    salts = (None, Salt("a"), Salt("b", start=4))
    prompts = [(rng.integers(0, 2, rng.integers(1, 14)).tolist(), salts[rng.integers(3)]) for _ in range(300)]
    cache, passages = served(prompts)
    found = survey(cache.snapshot(), passages)
    num_found = 0
    waiting = [(span, span.token_ids, span.namespace) for span in found.root.children]
    for span, path, namespace in waiting:  # grows while it is walked
        waiting += [(child, path + child.token_ids, namespace + child.namespace) for child in span.children]
        through = [passage for passage in passages if passes(passage, span, path, namespace)]
        inside = [range(span.start, min(span.start + span.num_tokens, len(p.prompt) // 4)) for p in through]
        cached = [sum(at < p.num_cached_tokens for at in where) for p, where in zip(through, inside, strict=True)]
        traffic = found.of(span)
        assert (traffic.num_requests, traffic.num_tokens) == (len(through), sum(map(len, inside)))
        assert traffic.num_cached_tokens == sum(cached)
        num_found += sum(cached)
    assert num_found == found.num_cached_tokens > 100
    assert found.num_requests == 300 and found.num_spans == len(waiting)
    assert found.num_tokens == cache.num_cached_tokens


def test_every_request_goes_through_the_spans_of_larger_blocks():
    rng = np.random.default_rng(3)
    cache, passages = served([(rng.integers(0, 2, rng.integers(3, 20)).tolist(), None) for _ in range(200)], 3)
    found = survey(cache.snapshot(), passages)
    assert sum(found.of(span).num_requests for span in found.root.children) == 200


def test_a_snapshot_of_a_live_cache_shows_pins_and_namespaces():
    cache = RadixCache(2)
    lease = cache.acquire([1, 2, 3, 4], Salt("tenant", start=2))
    cache.insert(lease, [1, 2, 3, 4], [7, 9])
    cache.commit()
    (span,) = cache.snapshot().children
    assert (span.num_tokens, span.num_blocks, span.num_pins, span.start) == (4, 2, 1, 0)
    assert span.namespace == (Salt("tenant", start=2),)
    assert token_list(span.token_ids) == "1 2 3 4"
    cache.release(lease)
    assert cache.snapshot().children[0].num_pins == 0
    cache.check()


def test_a_deep_path_and_an_empty_cache():
    cache, passages = served([(list(range(n)), None) for n in range(1, 1100)])
    found = survey(cache.snapshot(), passages)
    assert found.num_tokens == 1099
    (span,) = found.root.children  # a conversation that grew, never parted
    assert found.of(span).num_requests == 1099
    assert found.of(span).num_tokens - found.of(span).num_cached_tokens == 1099  # each computed one
    cache, passages = served([([*range(n), -n % 7 + 5000], None) for n in range(1, 1100)])
    page = to_html(survey(cache.snapshot(), passages), "deep", max_spans=10**6)
    assert page.count("<details") == page.count("</details>") > 1050
    empty = survey(RadixCache(16).snapshot())
    assert empty.num_spans == 0 and "0 spans" in to_html(empty, "empty")


class Page(HTMLParser):
    """Text by element, and whether every element that was opened was closed."""

    VOID = ("meta",)

    def __init__(self):
        super().__init__()
        self.open, self.text, self.tags, self.attributes = [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_is_well_formed_and_asks_for_nothing():
    tokenizer = load_tokenizer("bytes")
    texts = ["<script>alert(1)</script> & one", "<script>alert(1)</script> & two", "other </code>"]
    replay = Replay(CacheConfig("radix", 1))
    passages = [Passage(tokenizer.encode(text), replay.feed(tokenizer.encode(text))) for text in texts]
    page = Page()
    page.feed(to_html(survey(replay.cache.snapshot(), passages, tokenizer.decode), "A <title>"))
    assert not page.open
    assert "script" not in page.tags and not [value for name, value in page.attributes if name in ("src", "href")]
    shown = "".join(page.text)
    assert "<script>alert(1)</script> & " in shown and "other </code>" in shown and "A <title>" in shown


def test_what_is_left_out_of_the_page_is_counted():
    cache, passages = served([([i, 7], None) for i in range(50)])
    page = to_html(survey(cache.snapshot(), passages), "wide", max_spans=10)
    assert page.count('class="leaf"') == 10
    assert "40 more spans, 80 tokens, 40 requests" in page


def test_where_two_prompts_part():
    tokenizer = load_tokenizer("bytes")
    first, second = "x" * 40 + " Monday, then", "x" * 40 + " Sunday, then"
    found = compare_prompts(tokenizer.encode(first), tokenizer.encode(second), tokenizer.decode)
    assert found.num_common == 41 and found.before.endswith("xx ") and not found.namespaces_differ
    assert (found.first, found.second) == ("Monday, then", "Sunday, then")
    assert found.num_common_end == len("nday, then")
    by_cache = {(v.cache.cache, v.cache.block_size): (v.num_cached_tokens, v.num_lost_tokens) for v in found.verdicts}
    assert by_cache == {("flat_hash", 16): (32, 9), ("radix", 16): (41, 0), ("radix", 1): (41, 0)}


def test_a_namespace_parts_equal_prompts():
    same = pack(range(64))
    found = compare_prompts(same, same, token_list, namespaces=(Salt("a"), Salt("b")))
    assert found.num_common == 0 and found.namespaces_differ
    assert all(verdict.num_cached_tokens == 0 for verdict in found.verdicts)
    found = compare_prompts(same, same, token_list, namespaces=(Salt("a", start=40), Salt("b", start=40)))
    assert found.num_common == 40
    assert [verdict.num_cached_tokens for verdict in found.verdicts] == [32, 40, 40]


def test_one_is_the_start_of_the_other():
    found = compare_prompts(pack(range(32)), pack(range(64)), token_list)
    assert found.num_common == 32 and found.first == ""
    assert [verdict.num_cached_tokens for verdict in found.verdicts] == [32, 32, 32]
    found = compare_prompts(pack(range(64)), pack(range(64)), token_list)
    assert found.num_common == 64
    assert [verdict.num_lost_tokens for verdict in found.verdicts] == [16, 1, 1]  # one token is always computed


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    prompts = ["You are a bot. What is 1?", "Something else", "You are a bot. What is 2?"]
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return path


def test_the_command_draws_a_trace(trace, tmp_path, capsys):
    page = tmp_path / "tree.html"
    assert main([str(trace), "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "3 requests" in shown and "You are a" in shown
    assert "You are a bot. What is " in page.read_text()


def test_the_command_says_why(trace, capsys):
    assert main(["why", str(trace), "2"]) == 0
    shown = capsys.readouterr().out
    assert "request 0" in shown and "flat_hash" in shown
    assert main(["why", str(trace), "1", "2"]) == 0
    assert "the first 0 are the same" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["why", "TRACE", "3"], "no request 3"),
        (["why", "TRACE", "0"], "expected one with others before it"),
        (["why", "missing.jsonl", "1"], "missing.jsonl"),
        (["missing.jsonl"], "missing.jsonl"),
        (["TRACE", "--block-size", "0"], "block_size"),
        (["TRACE", "--tokenizer", "none"], "tokenizer"),
    ],
)
def test_bad_arguments_are_named(arguments, named, trace, capsys):
    assert main([str(trace) if argument == "TRACE" else argument for argument in arguments]) == 2
    assert named in capsys.readouterr().err


def test_text_files(tmp_path, capsys):
    for name, text in (("a.txt", "one and two"), ("b.txt", "one and three")):
        (tmp_path / name).write_text(text)
    assert main(["why", str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]) == 0
    assert "the first 9 are the same" in capsys.readouterr().out
