"""How many requests went through each span of a tree, and how many of them found it there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from radixkv.cache.namespace import LoRA, Media, Namespace, Salt, parts
from radixkv.cache.radix.cache import Span
from radixkv.cache.tokens import TOKEN_BYTES, unpack


@dataclass(frozen=True, slots=True)
class Passage:
    """One request, as it went through the cache.

    Attributes:
        prompt: [n] int32 packed tokens.
        num_cached_tokens: how many of them were found.
        namespace: as the request carried it.
    """

    prompt: bytes
    num_cached_tokens: int
    namespace: Namespace | None = None


@dataclass(slots=True)
class Traffic:
    """Of one span: requests whose prompts go through it or end in it, their tokens in it, and those found cached."""

    num_requests: int = 0
    num_tokens: int = 0
    num_cached_tokens: int = 0

    @property
    def found(self) -> float:
        """Share of the tokens that were found."""
        return self.num_cached_tokens / self.num_tokens if self.num_tokens else 0.0


@dataclass(slots=True)
class Survey:
    """A tree with its traffic.

    Attributes:
        root: the empty span at the top.
        traffic: of every span; spans that no prompt passes (an output's, or what was evicted and came again) have none.
        num_requests, num_prompt_tokens, num_cached_tokens: of all requests.
        text_of: packed tokens to the text to show.
    """

    root: Span
    text_of: Callable[[bytes], str]
    traffic: dict[Span, Traffic] = field(default_factory=dict)
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0

    def of(self, span: Span) -> Traffic:
        return self.traffic.get(span, Traffic())

    def by_traffic(self, span: Span) -> list[Span]:
        """Returns the children, those that most requests went through first, the longer first of equals."""
        return sorted(span.children, key=lambda child: (-self.of(child).num_requests, -child.num_tokens))

    @property
    def num_spans(self) -> int:
        return sum(1 for _ in below(self.root)) - 1

    @property
    def num_tokens(self) -> int:
        return sum(span.num_tokens for span in below(self.root))


def survey(root: Span, passages: Iterable[Passage] = (), text_of: Callable[[bytes], str] | None = None) -> Survey:
    """Counts which spans each request's prompt went through.

    Args:
        root: `RadixCache.snapshot()`.
        passages: the requests, in any order; without them the tree alone is described.
        text_of: a tokenizer's `decode`; None shows token ids.

    Cost: O(tokens of the requests).
    """
    found = Survey(root, text_of or token_list)
    children: dict[Span, dict[bytes, list[Span]]] = {}  # by their first token
    for passage in passages:
        found.num_requests += 1
        found.num_prompt_tokens += len(passage.prompt) // TOKEN_BYTES
        found.num_cached_tokens += passage.num_cached_tokens
        namespace = parts(passage.namespace)
        span = root
        while child := _next(span, passage.prompt, namespace, children):
            span = child
            traffic = found.traffic.setdefault(span, Traffic())
            traffic.num_requests += 1
            end = min(span.start + span.num_tokens, len(passage.prompt) // TOKEN_BYTES)
            traffic.num_tokens += end - span.start
            traffic.num_cached_tokens += min(max(passage.num_cached_tokens - span.start, 0), end - span.start)
    return found


def _next(span: Span, prompt: bytes, namespace: tuple, children: dict[Span, dict[bytes, list[Span]]]) -> Span | None:
    """Returns the child that the prompt goes through, or ends in; or None."""
    if span not in children:
        children[span] = {}
        for child in span.children:
            children[span].setdefault(child.token_ids[:TOKEN_BYTES], []).append(child)
    at = (span.start + span.num_tokens) * TOKEN_BYTES
    for child in children[span].get(prompt[at : at + TOKEN_BYTES], ()):
        end = min(at + len(child.token_ids), len(prompt))
        num_tokens = (end - at) // TOKEN_BYTES
        if child.token_ids.startswith(prompt[at:end]) and _starting(namespace, child.start, num_tokens) == _starting(
            child.namespace, child.start, num_tokens
        ):
            return child
    return None


def _starting(namespace: tuple, start: int, num_tokens: int) -> tuple[LoRA | Salt | Media, ...]:
    return tuple(part for part in namespace if start <= part.start < start + num_tokens)


def below(root: Span) -> Iterator[Span]:
    """Yields a span and all below it."""
    waiting = [root]
    while waiting:
        span = waiting.pop()
        yield span
        waiting.extend(span.children)


def token_list(packed: bytes) -> str:
    """Token ids as text, for traces without any."""
    return " ".join(map(str, unpack(packed).tolist()))
