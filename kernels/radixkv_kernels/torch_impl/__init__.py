"""The CPU's implementation (and any device's without Triton), vectorised plain torch. Module map:

`cells` the arithmetic of one cell; `state` the merge formula; `gather` paged cache -> scratch; `rows` which row sees
what; `narrow`, `wide` many short row sets, one long one; `tree` the items of a plan; `attention` ties them;
`cache_ops` store and copy; `workspace` scratch that outlives a call.
"""

from .attention import paged_attention, plan_tile, tree_attention, unsupported
from .cache_ops import copy_blocks, store_kv
from .cells import attention_row_rule
from .state import merge_states

__all__ = [
    "attention_row_rule",
    "copy_blocks",
    "merge_states",
    "paged_attention",
    "plan_tile",
    "store_kv",
    "tree_attention",
    "unsupported",
]
