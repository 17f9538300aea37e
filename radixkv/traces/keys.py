"""What of a record is prompt, and what is not: the one table of keys, of chats and requests alike.

A key that engines render becomes text where chat templates put it:

    system                              the system message's start (text, or a list of parts)
    tools, functions                    in the system message: `# Tools`, one JSON a line in <tools>
    documents                           after them: `# Documents`, one JSON a line in <documents>
    response_format                     after them: `# Response format`, its JSON in <response_format>
    prompt                              the text as it stands; beside any of the above or `images`, a user message
    suffix                              of a prompt: <|fim_prefix|>prompt<|fim_suffix|>suffix<|fim_middle|>
    messages, conversations             a message each; of a message
      role or from, name, tool_call_id    its head: `<|im_start|>tool name=ls tool_call_id=7`
      images                              media before its text
      reasoning_content, reasoning, thinking  <think> before its text, once where they say the same
      content or value                    text and parts
      refusal                             after it
      tool_calls, function_call           <tool_call> after all; a call's id is told by the message that answers it

A key that engines keep KV apart by becomes a namespace: `model`, the adapters of ADAPTERS, `cache_salt`, and media by
the digest of their bytes. Keys that concern the sampling of an output, or a log's own affairs, are ignored: the sets
below. Every other key is unknown: it is not read, and said aloud (`ReadCounts.unread`).
"""

# Sections of the system message, in order: the keys that fill one, its title and its tag.
SECTIONS = (
    (("tools", "functions"), "Tools", "tools"),
    (("documents",), "Documents", "documents"),
    (("response_format",), "Response format", "response_format"),
)
SYSTEM = "system"
# Where a prompt of token ids was made of these, they are in it.
TEXT_OF_PROMPT = ("prompt", "messages", SYSTEM, "suffix", *(key for keys, _, _ in SECTIONS for key in keys))

REASONING = ("reasoning_content", "reasoning", "thinking")
ADAPTERS = ("adapter", "adapter_id", "adapter_name", "lora", "lora_adapter", "lora_name", "lora_path", "lora_request")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Of a record, and of the body or request in it.
RECORD = _words(
    """
    temperature top_p top_k min_p top_a typical_p n best_of seed stop stop_sequences stop_token_ids ignore_eos
    max_tokens max_completion_tokens max_output_tokens max_new_tokens min_tokens presence_penalty frequency_penalty
    repetition_penalty length_penalty logit_bias logprobs top_logprobs prompt_logprobs echo stream stream_options
    include_stop_str_in_output skip_special_tokens spaces_between_special_tokens use_beam_search early_stopping
    tool_choice function_call parallel_tool_calls modalities options keep_alive timeout
    user store service_tier metadata priority request_id safety_identifier prompt_cache_key prompt_cache_retention
    anthropic_version anthropic_beta
    method url status status_code error usage latency latency_ms duration duration_ms
    total_duration load_duration eval_count eval_duration prompt_eval_count prompt_eval_duration done done_reason
    """
)
RESPONSE = RECORD | _words("id object type model created created_at system_fingerprint role stop_reason stop_sequence")
CHOICE = _words("index finish_reason stop_reason matched_stop logprobs content_filter_results")
MESSAGE = _words("id type status weight annotations cache_control timestamp created_at")
PART = _words(
    "id type cache_control detail annotations citations logprobs signature media_type mime_type mimeType filename"
)
MEDIA = PART | _words("format title name")
CALL = _words("id index type cache_control")
CHAT_BLOCKS = _words("parent_chat_id turn type")
