"""The model half of the engine: one decoder for Llama, Mistral, Qwen2, Qwen3 and a preset that needs no download.

Map: `config` what a model looks like, `hf_config` and `gguf` read it from checkpoints; `weights` its tensors, from
`hf_files`, `gguf` or `presets`; `rope`, `layers`, `transformer` the forward pass; `vocabulary`, `tokenizer`, `chat`
text; `sampling` logits -> tokens; `checkpoint` all of a model in one call; `fetch` gets a small real one. Importing
this loads nothing else.
"""
