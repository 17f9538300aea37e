"""One request of a trace or workload: the value that every reader and generator yields."""

from dataclasses import dataclass

from radixkv.cache.namespace import Namespace
from radixkv.cache.tokens import TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A prompt and the output that followed it.

    Attributes:
        id: the trace's own name of the request, or where it was read.
        prompt: [n >= 0] int32 packed token ids; a trace may hold empty prompts, which no engine serves.
        output: [m >= 0] int32 packed token ids, as sampled after `prompt`; empty where the trace has none.
        timestamp_s: arrival in seconds from the trace's own origin; None where the trace has no clock.
        session: the conversation, document or puzzle that the request belongs to.
        namespace: what its KV depends on besides its tokens; positions count from the prompt's first token.
    """

    id: str
    prompt: bytes
    output: bytes = b""
    timestamp_s: float | None = None
    session: str | None = None
    namespace: Namespace | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt) // TOKEN_BYTES

    @property
    def num_output_tokens(self) -> int:
        return len(self.output) // TOKEN_BYTES
