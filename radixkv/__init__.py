"""radixkv: prefix caching on a radix tree of token spans.

Importing this loads nothing else: neither torch nor numpy. A name loads its module when it is first used.

>>> from radixkv import KVManager, RadixCache
>>> manager = KVManager(RadixCache(block_size=16), num_blocks=1_000)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixkv.blocks.allocator import OutOfBlocks as OutOfBlocks
    from radixkv.blocks.config import CacheConfig as CacheConfig
    from radixkv.blocks.kv_manager import KVManager as KVManager
    from radixkv.blocks.replay import Replay as Replay
    from radixkv.cache.contract import PrefixCache as PrefixCache
    from radixkv.cache.flat_hash.cache import FlatHashCache as FlatHashCache
    from radixkv.cache.namespace import LoRA as LoRA
    from radixkv.cache.namespace import Media as Media
    from radixkv.cache.namespace import Salt as Salt
    from radixkv.cache.null import NullCache as NullCache
    from radixkv.cache.radix.cache import RadixCache as RadixCache
    from radixkv.engine.engine import Engine as Engine
    from radixkv.fleet.routing.policies import make_router as make_router
    from radixkv.scheduling.request import Request as Request
    from radixkv.scheduling.request import RequestOutput as RequestOutput
    from radixkv.scheduling.request import SamplingParams as SamplingParams
    from radixkv.scheduling.scheduler import Scheduler as Scheduler
    from radixkv.scheduling.scheduler import SchedulerConfig as SchedulerConfig
    from radixkv.simulate.simulator import Simulator as Simulator
    from radixkv.traces.trace import open_trace as open_trace
    from radixkv.traces.workload import open_workload as open_workload

__version__ = "0.1.0"

_MODULES = {
    "CacheConfig": "blocks.config",
    "Engine": "engine.engine",
    "FlatHashCache": "cache.flat_hash.cache",
    "KVManager": "blocks.kv_manager",
    "LoRA": "cache.namespace",
    "Media": "cache.namespace",
    "NullCache": "cache.null",
    "OutOfBlocks": "blocks.allocator",
    "PrefixCache": "cache.contract",
    "RadixCache": "cache.radix.cache",
    "Replay": "blocks.replay",
    "Request": "scheduling.request",
    "RequestOutput": "scheduling.request",
    "Salt": "cache.namespace",
    "SamplingParams": "scheduling.request",
    "Scheduler": "scheduling.scheduler",
    "SchedulerConfig": "scheduling.scheduler",
    "Simulator": "simulate.simulator",
    "make_router": "fleet.routing.policies",
    "open_trace": "traces.trace",
    "open_workload": "traces.workload",
}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value  # so that this function is not called for it again
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
