"""Paged-attention kernels for anyone's block tables: plain tensors in, plain tensors out. Knows nothing of radixkv."""

from .api import copy_blocks, merge_states, paged_attention, store_kv, tree_attention
from .contract import PlanConfig, PlanTensors, UnsupportedImplementation
from .plan.planner import TreePlanner
from .plan.stats import PlanStats
from .plan.tensors import PlanBuffers
from .plan.tree_plan import TreePlan
from .selection import plan_tile
from .torch_impl import attention_row_rule
from .tree_plans import TreePlans

__all__ = [
    "PlanBuffers",
    "PlanConfig",
    "PlanStats",
    "PlanTensors",
    "TreePlan",
    "TreePlanner",
    "TreePlans",
    "UnsupportedImplementation",
    "attention_row_rule",
    "copy_blocks",
    "merge_states",
    "paged_attention",
    "plan_tile",
    "store_kv",
    "tree_attention",
]
