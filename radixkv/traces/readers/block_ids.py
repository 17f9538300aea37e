"""Reader of traces that give ids of blocks in place of text: Mooncake's and Qwen-Bailian's.

Mooncake (FAST'25): `{"timestamp": ms, "input_length", "output_length", "hash_ids"}`, one id per 512 tokens.
Qwen-Bailian (ATC'25): ids per 16 tokens, `timestamp` in seconds, and `chat_id`, `parent_chat_id`, `turn`, `type`.
An id stands for the same tokens wherever it occurs; a partly filled last block has the first tokens of its id. Outputs
are known by length only: tokens that nothing else has.
"""

from radixkv.traces.fields import Fields
from radixkv.traces.fresh_tokens import block_tokens, unshared_tokens
from radixkv.traces.keys import CHAT_BLOCKS
from radixkv.traces.problems import BadRecord
from radixkv.traces.reader import JsonFormat
from radixkv.traces.request import TraceRequest
from radixkv.traces.values import kind, label_of, length_of, seconds_of, shown

MOONCAKE_BLOCK_SIZE = 512
BAILIAN_BLOCK_SIZE = 16


class BlockIdReader:
    """Block ids of one block size. Parsing costs O(ids), tokens are made when a request is asked for."""

    ignored = CHAT_BLOCKS

    def __init__(self, block_size: int, timestamp_unit_s: float) -> None:
        self._block_size, self._timestamp_unit_s = block_size, timestamp_unit_s

    def parse(self, record: Fields, number: int, ordinal: int) -> "BlockIdRequest":
        num_input = length_of(record.get("input_length"), "input_length")
        num_output = length_of(record.get("output_length") if "output_length" in record.value else 0, "output_length")
        block_ids = record.get("hash_ids")
        if not isinstance(block_ids, list):
            raise BadRecord(f"hash_ids: expected a list, got {kind(block_ids)}")
        for block_id in block_ids:
            if not isinstance(block_id, str) and (type(block_id) is not int or block_id < 0):
                raise BadRecord(f"hash_ids: expected integers >= 0 or strings, got {shown(block_id)}")
        num_blocks = -(-num_input // self._block_size)
        if len(block_ids) != num_blocks:
            raise BadRecord(
                f"hash_ids: expected {num_blocks} ids for an input_length of {num_input} in blocks of "
                f"{self._block_size} tokens, got {len(block_ids)}"
            )
        timestamp_s = seconds_of(record.get("timestamp"), "timestamp", self._timestamp_unit_s)
        chat = label_of(record.get("chat_id"), "chat_id")
        return BlockIdRequest(block_ids, self._block_size, num_input, num_output, timestamp_s, chat, ordinal, number)


class BlockIdRequest:
    """One request of a block-id trace."""

    def __init__(
        self,
        block_ids: list[int | str],
        block_size: int,
        num_input: int,
        num_output: int,
        timestamp_s: float | None,
        chat: str | None,
        ordinal: int,
        number: int,
    ) -> None:
        self._block_ids, self._block_size = block_ids, block_size
        self._num_input, self._num_output = num_input, num_output
        self._label, self._ordinal = chat or f"request{number}", ordinal
        self.num_requests = 1
        self.timestamps_s = None if timestamp_s is None else (timestamp_s,)
        self.num_bytes = 600 + 40 * len(block_ids)

    def request(self, turn: int) -> TraceRequest:
        prompt = block_tokens(self._block_ids, self._block_size)[: self._num_input]
        return TraceRequest(
            self._label,
            prompt.tobytes(),
            unshared_tokens(self._ordinal, self._num_output),
            None if self.timestamps_s is None else self.timestamps_s[0],
        )


_CAVEAT = "a trace of block ids tells of sharing by its own blocks alone: what is shared inside one is unknown"
BAILIAN = JsonFormat(
    "bailian",
    ("hash_ids",),
    lambda keys: "hash_ids" in keys and "chat_id" in keys,
    lambda encoder: BlockIdReader(BAILIAN_BLOCK_SIZE, timestamp_unit_s=1.0),
    tokens="block ids",
    caveat=_CAVEAT,
)
MOONCAKE = JsonFormat(
    "mooncake",
    ("hash_ids",),
    lambda keys: "hash_ids" in keys,
    lambda encoder: BlockIdReader(MOONCAKE_BLOCK_SIZE, timestamp_unit_s=1e-3),
    tokens="block ids",
    caveat=_CAVEAT,
    rank=1,
)
