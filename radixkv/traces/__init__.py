"""Requests to replay: traces from files, synthetic workloads from a seed. No torch.

for request in open_trace("trace.jsonl"):                  # conversations, requests, block ids, lengths
    request.prompt, request.output                         # packed int32
for request in open_workload("few_shot", seed=1): ...
"""

from radixkv.traces.formats import FORMATS
from radixkv.traces.problems import ReadCounts, TraceError
from radixkv.traces.request import TraceRequest
from radixkv.traces.tokenizers import Tokenizer, load_tokenizer
from radixkv.traces.trace import Trace, open_trace
from radixkv.traces.workload import WORKLOADS, Workload, open_workload

__all__ = [
    "FORMATS",
    "WORKLOADS",
    "ReadCounts",
    "Tokenizer",
    "Trace",
    "TraceError",
    "TraceRequest",
    "Workload",
    "load_tokenizer",
    "open_trace",
    "open_workload",
]
