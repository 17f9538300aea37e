"""Paged-attention kernels for anyone's block tables: plain tensors in, plain tensors out. Knows nothing of radixkv."""

from .api import copy_blocks, merge_states, paged_attention, store_kv
from .errors import UnsupportedImplementation

__all__ = ["UnsupportedImplementation", "copy_blocks", "merge_states", "paged_attention", "store_kv"]
