"""What cached blocks hold, each linked to what the block before it holds.

The flat hash keeps it only where a hash is not enough: to verify a hit, and to announce tokens to subscribers.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Optional

from radixkv.cache.contract import CacheCorruption
from radixkv.cache.events import EventEmitter
from radixkv.cache.flat_hash.block_map import BlockMap
from radixkv.cache.hashing import BlockHasher, ExtraKeys, Parts, extra_keys
from radixkv.cache.tokens import TOKEN_BYTES, unpack


class BlockContent:
    """Tokens and extra keys of one full block, and the content before it. Blocks of equal content may share one."""

    __slots__ = ("block_hash", "extra_keys", "parent", "token_ids")

    def __init__(
        self, parent: Optional["BlockContent"], block_hash: bytes, token_ids: bytes, extra_keys: ExtraKeys
    ) -> None:
        self.parent = parent  # None at the start of a request
        self.block_hash = block_hash
        self.token_ids = token_ids  # [block_size] int32 packed
        self.extra_keys = extra_keys

    def follows(self, parent: Optional["BlockContent"], token_ids: bytes, extra_keys: ExtraKeys) -> bool:
        """Whether this is the content of a block with these tokens and keys right after `parent`.

        All that came before is compared too: where digests collide, equal tokens may follow unequal ones. Where equal
        parents were two objects, they are one afterwards, so that the comparison of a chain costs O(1) per block.
        """
        if self.token_ids != token_ids or self.extra_keys != extra_keys or not same_content(self.parent, parent):
            return False
        self.parent = parent
        return True


def same_content(a: BlockContent | None, b: BlockContent | None) -> bool:
    """Whether two blocks hold the same after the same. O(1) for one object, else up to O(blocks before)."""
    while a is not b:
        if a is None or b is None or a.token_ids != b.token_ids or a.extra_keys != b.extra_keys:
            return False
        a, b = a.parent, b.parent
    return True


class BlockContents(dict[int, BlockContent]):
    """The contents of a flat hash's blocks, by block id."""

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self._block_size = block_size

    def verify(
        self, block_map: BlockMap, after: Sequence[int], hashes: Sequence[bytes], packed: bytes, parts: Parts
    ) -> list[int]:
        """Returns, for as many hashes as it can, a block that has the hash and really holds the tokens.

        Args:
            block_map: where each of the hashes is found.
            after: the blocks of the request so far.
            hashes: of the blocks after them.
            packed: [>= n * block_size] int32 packed tokens of those.
            parts: the request's namespace parts.
        """
        parent = self[after[-1]] if after else None
        found: list[int] = []
        for block_hash, (tokens, keys) in zip(hashes, self._split(packed, parts, len(after)), strict=False):
            block = next((b for b in block_map.all(block_hash) if self[b].follows(parent, tokens, keys)), None)
            if block is None:
                break
            found.append(block)
            parent = self[block]
        return found

    def keep(
        self,
        block_map: BlockMap,
        after: Sequence[int],
        hashes: Sequence[bytes],
        packed: bytes,
        parts: Parts,
        block_ids: Sequence[int],
    ) -> None:
        """Keeps what block_ids are about to hold. Arguments as for `verify`; equal contents become one object."""
        parent = self[after[-1]] if after else None
        split = self._split(packed, parts, len(after))
        for block, block_hash, (tokens, keys) in zip(block_ids, hashes, split, strict=False):
            equal = (self[b] for b in block_map.all(block_hash) if self[b].follows(parent, tokens, keys))
            parent = next(equal, None) or BlockContent(parent, block_hash, tokens, keys)
            self[block] = parent

    def announce(self, block_ids: Iterable[int], events: EventEmitter) -> None:
        """Publishes blocks to the subscribers, a chain of them at a time. O(n)."""
        for run in self._runs(block_ids):
            contents = [self[block] for block in run]
            parent = contents[0].parent
            events.publish(
                None if parent is None else parent.block_hash,
                run,
                [content.block_hash for content in contents],
                b"".join(content.token_ids for content in contents),
                [content.extra_keys for content in contents],
            )

    def check(self, hash_of: Mapping[int, bytes], hasher: BlockHasher) -> None:
        """Raises CacheCorruption unless these are the contents that the blocks were hashed from. O(tokens)."""
        if self.keys() != hash_of.keys():
            raise CacheCorruption("contents are not those of the blocks in the map")
        for block, content in self.items():
            parent = hasher.seed if content.parent is None else content.parent.block_hash
            value = parent, tuple(unpack(content.token_ids).tolist()), content.extra_keys
            if hasher.digest(value) != hash_of[block]:
                raise CacheCorruption(f"the hash of block {block} is not that of its content")

    def _runs(self, block_ids: Iterable[int]) -> Iterator[list[int]]:
        """Cuts block_ids into runs in which each block's content is the parent of the next one's."""
        run: list[int] = []
        for block in block_ids:
            if run and self[block].parent is not self[run[-1]]:
                yield run
                run = []
            run.append(block)
        if run:
            yield run

    def _split(self, packed: bytes, parts: Parts, num_before: int) -> Iterator[tuple[bytes, ExtraKeys]]:
        width = TOKEN_BYTES * self._block_size
        spans = (packed[at : at + width] for at in range(0, len(packed), width))
        return zip(spans, extra_keys(parts, num_before * self._block_size, self._block_size), strict=False)
