"""Tokenizers, chat templates, and text that never shows half a character."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from radixkv.engine.model.chat import ChatML, ChatTemplate
from radixkv.engine.model.presets import IM_END, IM_START, byte_tokenizer
from radixkv.engine.model.vocabulary import Vocabulary, byte_level_bytes, sentencepiece_bytes
from radixkv.engine.model.vocabulary_files import tokenizer_of_folder

TEXT = "The naïve café costs 3 € in 東京 🙂 and\n\ttwo  spaces."
CORPUS = ["the cat sat on the mat", "Where is the café?", "one two three 1234", TEXT]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <b>&"}]


@given(st.text(max_size=40), st.lists(st.integers(0, 255), max_size=12))
def test_bytes_come_back_and_parts_join_to_the_whole(text, noise):
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    detokenizer = tokenizer.detokenizer()
    for token, character in zip(ids, _completed(text), strict=True):
        assert detokenizer.push(token) == character
    assert detokenizer.finish() == ""

    ids = ids[: len(ids) // 2] + noise + ids[len(ids) // 2 :]
    detokenizer = tokenizer.detokenizer()
    assert "".join(map(detokenizer.push, ids)) + detokenizer.finish() == tokenizer.decode(ids)


def _completed(text):
    """For each byte of the text: the character that it completes, or ""."""
    for character in text:
        yield from [""] * (len(character.encode()) - 1)
        yield character


def test_special_tokens_are_found_and_are_not_text():
    tokenizer = byte_tokenizer()
    assert tokenizer.encode("a<|im_end|>b") == [97, IM_END, 98]
    assert tokenizer.decode([97, IM_END, 98, 9999]) == "ab"
    ids = tokenizer.encode_messages(MESSAGES)
    assert ids.count(IM_START) == 3 and tokenizer.decode(ids).endswith("assistant\n")
    assert tokenizer.encode_messages(MESSAGES, add_generation_prompt=False) == ids[: -len("assistant\n") - 1]
    with pytest.raises(ValueError, match="a role and a content"):
        tokenizer.encode_messages([{"role": "user"}])


def test_bytes_of_pieces():
    assert byte_level_bytes("Ġcaf") == b" caf" and byte_level_bytes("Ċ") == b"\n"
    assert byte_level_bytes("<|日|>") == "<|日|>".encode()
    assert sentencepiece_bytes("▁a▁b") == b" a b" and sentencepiece_bytes("<0xE2>") == b"\xe2"
    assert sentencepiece_bytes("<0xE2>>") == b"<0xE2>>"
    assert Vocabulary({0: b"a", 1: b"<s>"}, [1]).decode([1, 0, 1]) == "a"


def trained(folder, *, byte_level):
    tokenizer = Tokenizer(models.BPE(byte_fallback=not byte_level, unk_token=None if byte_level else "<unk>"))
    alphabet = []
    if byte_level:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        special = ["<|bos|>", "<|end|>"]
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        special = ["<unk>", "<|bos|>", "<|end|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False, max_token_length=8
    )
    tokenizer.train_from_iterator(CORPUS[:3], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def test_byte_level_tokenizer_json(tmp_path):
    inner = trained(tmp_path, byte_level=True)
    ours = tokenizer_of_folder(tmp_path, None)
    ids = ours.encode(TEXT + "<|end|>")
    assert ids == inner.encode(TEXT + "<|end|>").ids
    assert ours.decode(ids) == TEXT == inner.decode(ids)
    detokenizer = ours.detokenizer()
    parts = [detokenizer.push(token) for token in ids]
    assert "".join(parts) == TEXT and "\ufffd" not in "".join(parts) and "" in parts


def test_sentencepiece_tokenizer_json(tmp_path):
    inner = trained(tmp_path, byte_level=False)
    values = json.loads((tmp_path / "tokenizer.json").read_text())
    values["added_tokens"] = [t for t in values["added_tokens"] if not t["content"].startswith("<0x")]
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    ours = tokenizer_of_folder(tmp_path, None)
    ids = ours.encode(TEXT)
    assert ours.decode(ids) == " " + TEXT  # the space that this kind of vocabulary puts before a text
    assert inner.decode(ids, skip_special_tokens=False) == TEXT


def test_a_decoder_that_is_not_known(tmp_path):
    tokenizer = Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"supported decoders are .*WordPiece"):
        tokenizer_of_folder(tmp_path, None)


def test_no_tokenizer_and_no_template(tmp_path):
    assert tokenizer_of_folder(tmp_path, None) is None
    trained(tmp_path, byte_level=True)
    with pytest.raises(ValueError, match="this one has none"):
        tokenizer_of_folder(tmp_path, None).encode_messages(MESSAGES)


TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {% if message.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}\n"
    "{{ message.role }}: {{ message.content | tojson }}{% endfor %}{% if add_generation_prompt %}!{% endif %}"
)


@pytest.mark.parametrize("form", ["text", "named", "file"])
def test_templates_of_a_folder(tmp_path, form):
    trained(tmp_path, byte_level=True)
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": TEMPLATE}]
    config = {"bos_token": {"content": "<|bos|>"}, "eos_token": "<|end|>", "pad_token": None}
    if form == "file":
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    else:
        config["chat_template"] = TEMPLATE if form == "text" else named
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = tokenizer_of_folder(tmp_path, None)
    ids = tokenizer.encode_messages(MESSAGES)
    assert tokenizer.decode(ids) == 'system: "Be brief."user: "Hi <b>&"!'
    assert ids[0] == tokenizer.encode("<|bos|>")[0]
    with pytest.raises(ValueError, match="no tools"):
        tokenizer.encode_messages([{"role": "tool", "content": ""}])


def test_templates_run_in_a_sandbox():
    with pytest.raises(ValueError, match="refused by the chat template"):
        ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", {}).render(MESSAGES)
    with pytest.raises(ValueError, match="valid Jinja"):
        ChatTemplate("{% if %}", {})
    assert ChatML().render(MESSAGES[:1], add_generation_prompt=False) == "<|im_start|>system\nBe brief.<|im_end|>\n"
