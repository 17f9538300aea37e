"""Tokenizers by name and path, and chat encoding message by message that equals encoding the whole text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.cache.tokens import unpack
from radixkv.traces import load_tokenizer, open_trace
from radixkv.traces.chat import ChatEncoder
from radixkv.traces.messages import MediaPart, Message
from radixkv.traces.tokenizers import VOCABULARIES, LibraryTokenizer
from tests.traces.trace_files import conversation, write_lines

CONTENTS = [
    "hi",
    "\n\nstart",
    "end \n",
    " ",
    "",
    "it's 12345",
    "é\u3000ü",
    "<|im_end|>",
    "a<|im_start|>b",
    "x" * 100,
    "\r\n",
]


@pytest.fixture(scope="module")
def trained():
    """A small BPE vocabulary with the chat's special tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["the cat sat on the mat", "user assistant system"] * 20, trainer)
    return made


@pytest.fixture
def path(trained, tmp_path):
    trained.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


@pytest.fixture(scope="module", params=["bytes", *VOCABULARIES, "trained"])
def tokenizer(request, tmp_path_factory):
    if request.param == "trained":
        made = request.getfixturevalue("trained")
        folder = tmp_path_factory.mktemp("model")
        made.save(str(folder / "tokenizer.json"))
        return load_tokenizer(str(folder))
    if request.param != "bytes":
        pytest.importorskip("quicktok")
    return load_tokenizer(request.param)


def rendered(messages):
    return (
        "".join(f"<|im_start|>{m.role}\n{''.join(m.parts)}<|im_end|>\n" for m in messages) + "<|im_start|>assistant\n"
    )


def test_round_trip_and_range(tokenizer):
    for text in CONTENTS:
        ids = unpack(tokenizer.encode(text))
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert not len(ids) or 0 <= ids.min() <= ids.max() < tokenizer.vocab_size
        assert tokenizer.encode(text) == tokenizer.encode(text)
    with pytest.raises(ValueError, match="surrogates"):
        tokenizer.encode("a\ud800")


@settings(max_examples=60, deadline=None)
@given(
    contents=st.lists(
        st.sampled_from(CONTENTS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=12), max_size=6
    )
)
def test_messages_joined_are_the_whole_text_encoded(tokenizer, contents):
    encoder = ChatEncoder(tokenizer)
    messages = [Message("user" if i % 2 else "assistant", (text,)) for i, text in enumerate(contents)]
    assert tokenizer.joins_at_messages
    whole = tokenizer.encode(rendered(messages))
    assert encoder.prompt(messages).packed == whole
    assert encoder.prompt(messages, [encoder.message(message) for message in messages]).packed == whole
    for message in messages:
        assert encoder.output(message).packed == tokenizer.encode(message.parts[0] + "<|im_end|>\n")


def test_special_tokens_are_single_ids(tokenizer):
    specials = {"qwen3": 2, "trained": 2}
    num_tokens = len(unpack(tokenizer.encode("<|im_start|><|im_end|>")))
    assert num_tokens == specials.get(tokenizer.name, num_tokens)


def test_a_tokenizer_that_marks_the_start_of_a_text_gets_whole_prompts(tmp_path):
    marked = LibraryTokenizer(
        "marked", 2**17, lambda text: [1, *map(ord, text)], lambda ids: "".join(map(chr, ids[1:]))
    )
    assert not marked.joins_at_messages
    path = write_lines(tmp_path / "t", conversation("a", 2))
    plain = list(open_trace(path))
    requests = list(open_trace(path, tokenizer=marked))
    assert [unpack(r.prompt).tolist() for r in requests] == [[1, *unpack(r.prompt).tolist()] for r in plain]


def test_media_keep_their_positions_in_any_tokenizer(tokenizer):
    encoder = ChatEncoder(tokenizer)
    encoded = encoder.prompt([Message("user", ("see ", MediaPart("d1"), " and ", MediaPart("d2")))])
    placeholder = tokenizer.encode("<|image_pad|>")
    assert [media.digest for media in encoded.media] == ["d1", "d2"]
    for media in encoded.media:
        assert encoded.packed[4 * media.start : 4 * (media.start + media.length)] == placeholder


def test_the_memo_stays_within_its_bound():
    calls = []

    def encode(text):
        calls.append(text)
        return [ord(char) for char in text]

    tokenizer = LibraryTokenizer("t", 2**17, encode, str, memo_bytes=5_000)
    calls.clear()
    texts = [f"{i:0100}" for i in range(50)]
    for text in [*texts, *texts]:
        tokenizer.encode(text)
    assert len(calls) == 100
    tokenizer.encode(texts[-1])
    assert len(calls) == 100
    assert tokenizer._memo_bytes <= 5_000


def test_a_tokenizer_json_neither_cuts_nor_pads(trained, path):
    trained.enable_truncation(3)
    trained.enable_padding(length=8)
    trained.save(str(path))
    assert len(unpack(load_tokenizer(str(path)).encode("the cat sat on the mat"))) > 3
    assert len(unpack(load_tokenizer(str(path)).encode("a"))) == 1
    trained.no_truncation()
    trained.no_padding()


def test_traces_take_a_tokenizer(tmp_path, path):
    trace = open_trace(write_lines(tmp_path / "t", conversation("the cat", 1)), tokenizer=str(path))
    (request,) = trace
    assert trace.tokenizer.decode(request.prompt) == (
        "<|im_start|>user\nthe cat asks 0<|im_end|>\n<|im_start|>assistant\n"
    )
    assert request.num_prompt_tokens < 40


def test_unknown_and_broken(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"a vocabulary \(qwen3, o200k, cl100k, llama3; extra: vocabularies\)"):
        load_tokenizer("gpt7")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is no tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    monkeypatch.setitem(__import__("sys").modules, "quicktok", None)
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"'qwen3' needs quicktok.*radixkv\[vocabularies\]"):
        load_tokenizer("qwen3")
    with pytest.raises(ValueError, match=r"needs tokenizers.*radixkv\[models\]"):
        load_tokenizer(str(tmp_path))
