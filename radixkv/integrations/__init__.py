"""Other engines on radixkv: each module needs its engine installed, and stands in for the engine's own index of KV.

vLLM: `vllm serve MODEL --scheduler-cls radixkv.integrations.vllm.RadixScheduler` (docs/vllm.md).
"""
