"""Block-id traces share where their ids agree and nowhere else; length traces share nothing."""

import subprocess
import sys

import pytest

from radixkv.cache.tokens import num_common_tokens, unpack
from radixkv.traces import TraceError, open_trace
from radixkv.traces.fresh_tokens import block_tokens, unshared_tokens
from tests.traces.trace_files import write_lines


def mooncake(timestamp, length, ids, output=3):
    return {"timestamp": timestamp, "input_length": length, "output_length": output, "hash_ids": ids}


def test_mooncake_shares_by_block_and_partial_last_block(tmp_path):
    path = write_lines(
        tmp_path / "t", mooncake(2500, 1100, [0, 7, 9]), mooncake(0, 1034, [0, 7, 9]), mooncake(3000, 1536, [0, 8, 9])
    )
    trace = open_trace(path)
    a, b, c = trace
    assert trace.formats == ("mooncake",) and trace.sharing_known and trace.tokenizer is None
    assert [r.timestamp_s for r in (a, b, c)] == [0, 2.5, 3]
    assert [r.num_prompt_tokens for r in (a, b, c)] == [1034, 1100, 1536]
    assert num_common_tokens(a.prompt, b.prompt) == 1034
    assert num_common_tokens(b.prompt, c.prompt) == 512
    assert a.num_output_tokens == 3
    # An unknown output continues a prompt as no other output and no block does.
    assert num_common_tokens(a.prompt + a.output, b.prompt) == 1034


def test_bailian(tmp_path):
    record = {"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 20, "output_length": 2}
    path = write_lines(tmp_path / "t", {**record, "type": "text", "turn": 1, "hash_ids": [4, 5]})
    (request,) = open_trace(path)
    assert open_trace(path).formats == ("bailian",)
    assert (request.id, request.timestamp_s, request.num_prompt_tokens) == ("159", 61.114, 20)
    assert unpack(request.prompt).tolist() == block_tokens([4, 5], 16)[:20].tolist()


@pytest.mark.parametrize("block_size", [1, 16, 512])
def test_different_ids_differ_at_every_position(block_size):
    tokens = block_tokens([0, 1, 2, 511, 2**30 - 1, 2**30, 2**70, "a", "b"], block_size).reshape(9, block_size)
    assert all(len(set(column)) == 9 for column in tokens.T.tolist())
    assert tokens.min() >= 0 and tokens.max() < 2**30
    assert (tokens == block_tokens([0, 1, 2, 511, 2**30 - 1, 2**30, 2**70, "a", "b"], block_size).reshape(9, -1)).all()


def test_unshared_tokens_are_their_own():
    firsts = [unpack(unshared_tokens(i, 4)) for i in range(200)]
    assert len({int(tokens[0]) for tokens in firsts}) == 200
    assert all(tokens.min() >= 2**30 for tokens in firsts)
    assert unshared_tokens(5, 10)[16:] == unshared_tokens(5, 6, start=4)


def test_the_same_in_every_process():
    code = "from radixkv.traces.fresh_tokens import *; print(block_tokens([3, 'x', 2**80], 2).tolist())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == str(block_tokens([3, "x", 2**80], 2).tolist())


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (mooncake(0, -5, []), "input_length: expected an integer in 0..16777216, got -5"),
        (mooncake(0, 10**12, [1]), "input_length: expected"),
        (mooncake(0, 513, [1]), "hash_ids: expected 2 ids for an input_length of 513 in blocks of 512 tokens, got 1"),
        (mooncake(0, 5, [-1]), "hash_ids: expected integers >= 0 or strings, got -1"),
        (mooncake(0, 5, [None]), "hash_ids: expected integers >= 0 or strings, got null"),
        (mooncake(0, 5, [True]), "hash_ids: expected integers >= 0 or strings, got True"),
        (mooncake(0, 5, None), "hash_ids: expected a list, got null"),
        (mooncake(0, 5, [1], output=-1), "output_length: expected an integer in 0"),
        (mooncake("?", 5, [1]), "timestamp: expected a finite number"),
        ({"hash_ids": []}, "input_length: expected an integer in 0..16777216, got null"),
    ],
)
def test_bad_block_id_records(tmp_path, record, reason):
    path = write_lines(tmp_path / "t", mooncake(0, 1, [1]), record)
    with pytest.raises(TraceError, match=f"line 2: {reason}"):
        list(open_trace(path))


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"


def test_azure_lengths(tmp_path):
    path = write_lines(
        tmp_path / "azure.csv", AZURE, "2023-11-16 18:15:46.6805900,374,44", "", "2023-11-16 18:15:45+00:00,1,0"
    )
    trace = open_trace([path, path])
    assert trace.formats == ("azure", "azure") and not trace.sharing_known and trace.tokenizer is None
    requests = list(trace)
    assert [(r.num_prompt_tokens, r.num_output_tokens) for r in requests] == [(1, 0), (374, 44)] * 2
    assert requests[1].timestamp_s - requests[0].timestamp_s == pytest.approx(1.68059)
    assert len({r.prompt[:4] for r in requests}) == 4
    assert list(trace) == requests


@pytest.mark.parametrize(
    "header", ["ContextTokens,extra,GeneratedTokens,TIMESTAMP", f'"{AZURE.replace(",", chr(34) + "," + chr(34))}"']
)
def test_azure_columns_by_name(tmp_path, header):
    row = "5,x,6,2024-05-10 00:00:00" if "extra" in header else "2024-05-10 00:00:00,5,6"
    path = tmp_path / "t"
    path.write_bytes(b"\xef\xbb\xbf" + f"{header}\r\n{row}\r\n".encode())
    (request,) = open_trace(path)
    assert (request.num_prompt_tokens, request.num_output_tokens) == (5, 6)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("2023-11-16 18:15:46,1", "expected 3 columns, got 2"),
        ("2023-11-16 18:15:46,-1,1", "ContextTokens: expected an integer in 0..16777216, got '-1'"),
        ("2023-11-16 18:15:46,1,x", "GeneratedTokens: expected an integer"),
        ("2023-11-16 18:15:46,1,99999999999", "GeneratedTokens: expected an integer"),
        ("noon,1,1", "TIMESTAMP: expected a finite number or an ISO 8601 time, got 'noon'"),
        (b"\xff,1,1", "no UTF-8"),
    ],
)
def test_bad_rows(tmp_path, row, reason):
    path = write_lines(tmp_path / "t", AZURE, row)
    with pytest.raises(TraceError, match=f"line 2: {reason}"):
        list(open_trace(path))
    trace = open_trace(path, skip_bad=True)
    assert list(trace) == [] and trace.counts.num_bad == 1


def test_a_length_of_none_is_an_empty_prompt(tmp_path):
    lengths = write_lines(tmp_path / "a.csv", AZURE, "2023-11-16 18:15:46,0,4", "2023-11-16 18:15:47,5,4")
    blocks = write_lines(tmp_path / "m", mooncake(0, 0, []), mooncake(1, 5, [1]))
    for path in (lengths, blocks):
        trace = open_trace(path)
        assert [r.num_prompt_tokens for r in trace] == [0, 5]
        assert trace.counts.num_empty == 1


def test_columns_that_are_not_read_are_named(tmp_path):
    header = "TIMESTAMP,Service,ContextTokens,GeneratedTokens"
    trace = open_trace(write_lines(tmp_path / "t", header, "2023-11-16 18:15:46,code,1,1", "2023-11-16 18:15:46,,1,1"))
    assert len(list(trace)) == 2
    assert {name: key.num_times for name, key in trace.counts.unread.items()} == {"Service": 1}
    with pytest.raises(
        TraceError, match="line 1: expected a header with a name for each column, got 'TIMESTAMP' twice"
    ):
        open_trace(write_lines(tmp_path / "t", f"{AZURE},TIMESTAMP", "1,1,1,2"))


def test_azure_needs_its_header(tmp_path):
    path = write_lines(tmp_path / "t", "2023-11-16 18:15:46,1,1")
    with pytest.raises(TraceError, match="line 1: expected a header with TIMESTAMP, ContextTokens"):
        open_trace(path, format="azure")
    with pytest.raises(TraceError, match="without even a header"):
        open_trace(write_lines(tmp_path / "e"), format="azure")
