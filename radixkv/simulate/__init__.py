"""The engine without a model, in virtual time: the same scheduler, manager and caches, and a cost model. No torch.

cost = Roofline.of("llama-3-8b", "h100-sxm", tree_attention=True)
simulator = Simulator(Scheduler(KVManager(RadixCache(16), cost.num_blocks(16))), cost)
result = run(simulator, poisson(open_trace("trace.jsonl"), rate_per_s=8))
print(summarize(result.served))
"""

from radixkv.simulate.arrivals import Arrivals, ClosedLoop, OpenLoop, Result, at_once, poisson, run
from radixkv.simulate.cost_model import FEATURES, CostModel, Fitted, Roofline
from radixkv.simulate.gpus import GPUS, Gpu
from radixkv.simulate.report import Served, summarize
from radixkv.simulate.simulator import Simulator
from radixkv.simulate.step_load import StepLoad, measure_load

__all__ = [
    "FEATURES",
    "GPUS",
    "Arrivals",
    "ClosedLoop",
    "CostModel",
    "Fitted",
    "Gpu",
    "OpenLoop",
    "Result",
    "Roofline",
    "Served",
    "Simulator",
    "StepLoad",
    "at_once",
    "measure_load",
    "poisson",
    "run",
    "summarize",
]
