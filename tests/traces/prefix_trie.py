"""A plain trie of token spans, for tests: the longest prefix that anything inserted before shares with a sequence."""

from radixkv.cache.tokens import TOKEN_BYTES, num_common_tokens


class PrefixTrie:
    def __init__(self) -> None:
        self._root: list = [b"", {}]  # [span, {first token of a child's span: child}]

    def longest_then_insert(self, packed: bytes) -> int:
        """Returns the tokens shared with what was inserted before, and inserts `packed`."""
        node, at = self._root, 0
        while at < len(packed):
            child = node[1].get(packed[at : at + TOKEN_BYTES])
            if child is None:
                node[1][packed[at : at + TOKEN_BYTES]] = [packed[at:], {}]
                return at // TOKEN_BYTES
            common = num_common_tokens(child[0], packed, 0, at) * TOKEN_BYTES
            if common < len(child[0]):
                tail = [child[0][common:], child[1]]
                child[0], child[1] = child[0][:common], {child[0][common : common + TOKEN_BYTES]: tail}
            node, at = child, at + common
        return at // TOKEN_BYTES


def reference_hits(requests, block_size: int, *, cache_outputs: bool) -> tuple[int, int]:
    """Returns (hits, prompt tokens) of an infinite cache: floor(min(lcp, n - 1) / block_size) * block_size each."""
    trie = PrefixTrie()
    hits = total = 0
    for request in requests:
        common = trie.longest_then_insert(request.prompt)
        if cache_outputs:
            trie.longest_then_insert(request.prompt + request.output)
        hits += min(common, request.num_prompt_tokens - 1) // block_size * block_size
        total += request.num_prompt_tokens
    return hits, total
