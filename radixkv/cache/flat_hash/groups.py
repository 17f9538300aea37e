"""How vLLM lays the layers of a model out in one pool of equal blocks: groups of layers, block size, positions.

Source: vLLM 0.32, `vllm/v1/core/kv_cache_utils.py` (groups, equal pages), `vllm/v1/core/sched/scheduler.py` (chunks).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from radixkv.cache.contract import check_block_size
from radixkv.cache.layers import Layer, Layers, Recurrent, Window

KERNEL_BLOCK_SIZE = 16  # tokens: the blocks of attention are multiples of it


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that keep the same, and share block tables.

    Attributes:
        layer: what each of them keeps.
        num_layers: fewer than the layout's `num_pages` where the rest of a block is padding.
    """

    layer: Layer
    num_layers: int


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """The groups of a model, and what their blocks have in common.

    >>> from radixkv.cache.layers import FullAttention, Recurrent
    >>> state = Recurrent(state_bytes=1_097_728, row_bytes=0)
    >>> layout = GroupLayout.of((state, state, state, FullAttention(2048)) * 10)
    >>> [(type(group.layer).__name__, group.num_layers) for group in layout.groups]
    [('Recurrent', 10), ('Recurrent', 10), ('Recurrent', 10), ('FullAttention', 10)]
    >>> layout.block_size, layout.block_bytes
    (544, 11141120)

    Attributes:
        groups: in the order in which they take and give back blocks.
        block_size: tokens in a block, of every group.
        match_unit: a hit ends at a multiple of it: less than block_size in fine mode.
        num_pages: layers in a block, of every group.
        page_bytes: of one layer in a block; states are padded to it.
    """

    groups: tuple[Group, ...]
    block_size: int
    match_unit: int
    num_pages: int
    page_bytes: int

    @classmethod
    def of(cls, layers: Layers, *, block_size: int | None = None, match_unit: int | None = None) -> GroupLayout:
        """Returns vLLM's layout of a model.

        Args:
            layers: of the model.
            block_size: tokens; None: the least multiple of `KERNEL_BLOCK_SIZE` whose attention page holds a state.
            match_unit: tokens, a divisor of block_size (vLLM's `prefix_match_unit`); None: block_size. It changes
                nothing without recurrent layers, beside windows, or where there is one group.

        Raises:
            ValueError: no layers; attention layers that keep different bytes a token (vLLM gives them blocks of
                different sizes, which is not modelled); a bad block_size or match_unit.
        """
        if not layers:
            raise ValueError("layers: expected at least one, got none")
        token_bytes = sorted({layer.token_bytes for layer in layers if not isinstance(layer, Recurrent)})
        if len(token_bytes) > 1:
            raise ValueError(f"layers: expected attention layers of equal token_bytes, got {token_bytes}")
        state_bytes = max((layer.state_bytes for layer in layers if isinstance(layer, Recurrent)), default=0)
        if block_size is None:
            unit_bytes = KERNEL_BLOCK_SIZE * token_bytes[0] if token_bytes else 0
            num_units = max(-(-state_bytes // unit_bytes), 1) if unit_bytes else 1
            block_size = KERNEL_BLOCK_SIZE * num_units
        check_block_size(block_size)
        unit = block_size if match_unit is None else match_unit
        if type(unit) is not int or unit < 1 or block_size % unit:
            raise ValueError(f"match_unit: expected a divisor of block_size {block_size}, got {match_unit!r}")
        groups, num_pages = _groups(layers)
        if len(groups) == 1 or not state_bytes or any(isinstance(layer, Window) for layer in layers):
            unit = block_size
        page_bytes = max(token_bytes[0] * block_size if token_bytes else 0, state_bytes)
        return cls(groups, block_size, unit, num_pages, page_bytes)

    @property
    def block_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def is_fine(self) -> bool:
        """Whether hits may end inside a block."""
        return self.match_unit < self.block_size

    @property
    def has_states(self) -> bool:
        """Whether there are recurrent groups."""
        return any(isinstance(group.layer, Recurrent) for group in self.groups)

    def num_window_blocks(self, window: Window) -> int:
        """Returns how many blocks before a position a window needs to go on from there."""
        return -(-(window.num_tokens - 1) // self.block_size)

    def last_position(self, num_tokens: int) -> int:
        """Returns the deepest position that a prompt of so many tokens can hit."""
        return (num_tokens - 1) // self.match_unit * self.match_unit

    def chunk_end(self, start: int, num_tokens: int, junction: int, budget: int) -> int:
        """Returns where a prompt's next forward pass ends: with states, where one is to be kept at the latest.

        Args:
            start: tokens computed or hit.
            num_tokens: of the prompt, more than start.
            junction: position where full attention matched and a state was missing; 0 if none.
            budget: most tokens in a pass.
        """
        end = min(num_tokens, start + budget)
        if not self.has_states:
            return end
        block = self.block_size
        if end < num_tokens and end // block * block > start:
            end = end // block * block
        stops = [-(-start // block) * block, (num_tokens - 1) // block * block]
        if self.is_fine:
            stops.append(self.last_position(num_tokens))
        if start < junction < end:
            stops.append(start + (junction - start) // block * block)
        return min((stop for stop in stops if start < stop < end), default=end)


def _groups(layers: Layers) -> tuple[tuple[Group, ...], int]:
    """Cuts the layers that keep the same into groups of nearly one size; returns that size too."""
    buckets = Counter(layers)  # in the order of each one's first layer
    smallest, largest = min(buckets.values()), max(buckets.values())
    size = largest if largest < 1.5 * smallest else smallest
    groups = []
    for layer, count in buckets.items():
        num_groups = -(-count // size)
        groups += [Group(layer, len(range(i, count, num_groups))) for i in range(num_groups)]
    return tuple(groups), size
