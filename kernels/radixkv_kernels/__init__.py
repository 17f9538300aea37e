"""Paged-attention kernels for anyone's block tables: plain tensors in, plain tensors out. Knows nothing of radixkv."""

from .api import copy_blocks, merge_states, paged_attention, store_kv, tree_attention
from .errors import UnsupportedImplementation
from .plan import PlanConfig, TreePlan
from .plan_buffers import PlanBuffers, PlanTensors
from .plan_stats import PlanStats
from .planner import TreePlanner

__all__ = [
    "PlanBuffers",
    "PlanConfig",
    "PlanStats",
    "PlanTensors",
    "TreePlan",
    "TreePlanner",
    "UnsupportedImplementation",
    "copy_blocks",
    "merge_states",
    "paged_attention",
    "store_kv",
    "tree_attention",
]
