"""Vocabularies in files -> Tokenizer: tokenizer.json, GGUF's own, lists of pieces with scores.

All of them are run by the `tokenizers` package; what is not in its form is built in it, from merges (byte-level BPE) or
from scores (SentencePiece's BPE, whose merges are all ways to split a piece, best score first).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors

from radixkv.engine.model.chat import ChatTemplate
from radixkv.engine.model.gguf import GgufFile
from radixkv.engine.model.tokenizer import Tokenizer
from radixkv.engine.model.vocabulary import Vocabulary, byte_level_bytes, sentencepiece_bytes

_CONTROL, _USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


class _Encoder:
    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids


def tokenizer_of_folder(folder: Path, bos_token_id: int | None) -> Tokenizer | None:
    """tokenizer.json, or vocab.json with scores; None where a folder has neither.

    Args:
        bos_token_id: for vocab.json, which does not say what texts begin with.

    Raises:
        ValueError: a decoder whose tokens are not known as bytes.
    """
    path = folder / "tokenizer.json"
    template = _template_of_folder(folder)
    if path.is_file():
        inner = tokenizers.Tokenizer.from_file(str(path))
        return Tokenizer(_Encoder(inner), _vocabulary(inner, json.loads(path.read_text())["decoder"]), template)
    path = folder / "vocab.json"
    if path.is_file():
        values = json.loads(path.read_text())
        if "scores" in values:
            pieces = [_from_latin1(piece) for piece in values["vocab"]]
            control = [0, *([] if bos_token_id is None else [bos_token_id, bos_token_id + 1])]
            return _sentencepiece(pieces, values["scores"], control, [], bos_token_id, True, template)
    return None


def tokenizer_of_gguf(file: GgufFile) -> Tokenizer:
    """The vocabulary and chat template that a GGUF file holds.

    Raises:
        ValueError: a kind of vocabulary, or of splitting into words, that is not supported; the message lists those
            that are.
    """
    pieces: list[str] = file.require("tokenizer.ggml.tokens")
    kinds = file.get("tokenizer.ggml.token_type", [1] * len(pieces))
    control = [token for token, kind in enumerate(kinds) if kind == _CONTROL]
    added = [token for token, kind in enumerate(kinds) if kind == _USER_DEFINED]
    bos = file.get("tokenizer.ggml.bos_token_id")
    source = file.get("tokenizer.chat_template")
    special = {
        f"{name}_token": pieces[token]
        for name in ("bos", "eos")
        if (token := file.get(f"tokenizer.ggml.{name}_token_id")) is not None
    }
    template = None if source is None else ChatTemplate(source, special)
    model = file.require("tokenizer.ggml.model")
    if model == "llama":
        scores = file.require("tokenizer.ggml.scores")
        first = bos if file.get("tokenizer.ggml.add_bos_token", True) else None
        space = file.get("tokenizer.ggml.add_space_prefix", True)
        return _sentencepiece(pieces, scores, control, added, first, space, template)
    if model != "gpt2":
        raise ValueError(f"tokenizer.ggml.model: supported are gpt2 and llama, got {model!r}")
    inner = _byte_level(pieces, file.require("tokenizer.ggml.merges"), file.get("tokenizer.ggml.pre", "gpt-2"))
    _add_tokens(inner, pieces, control, added)
    if file.get("tokenizer.ggml.add_bos_token", False) and bos is not None:
        _begin_with(inner, pieces[bos], bos)
    token_bytes = {token: byte_level_bytes(piece) for token, piece in enumerate(pieces)}
    token_bytes.update({token: pieces[token].encode() for token in added})
    return Tokenizer(_Encoder(inner), Vocabulary(token_bytes, control), template)


def _byte_level(pieces: Sequence[str], merges: Sequence[str], pre: str) -> tokenizers.Tokenizer:
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    no_split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    splits: dict[str, list[Any]] = {
        "gpt-2": [plain],
        "smollm": [pre_tokenizers.Digits(individual_digits=True), plain],
        "llama-bpe": [pre_tokenizers.Split(Regex(_LLAMA3), "isolated"), no_split],
        "qwen2": [pre_tokenizers.Split(Regex(_QWEN2), "isolated"), no_split],
    }
    if pre not in splits:
        raise ValueError(f"tokenizer.ggml.pre: supported are {', '.join(splits)}, got {pre!r}")
    pairs = [(left, right) for left, right in (merge.split(" ", 1) for merge in merges)]
    inner = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: token for token, piece in enumerate(pieces)}, merges=pairs, ignore_merges=pre == "llama-bpe"
        )
    )
    inner.pre_tokenizer = pre_tokenizers.Sequence(splits[pre])
    if pre == "qwen2":
        inner.normalizer = normalizers.NFC()
    return inner


def _sentencepiece(
    pieces: Sequence[str],
    scores: Sequence[float],
    control: Sequence[int],
    added: Sequence[int],
    bos: int | None,
    space_prefix: bool,
    template: ChatTemplate | None,
) -> Tokenizer:
    marked = [piece.replace(" ", "▁") for piece in pieces]
    vocab = {piece: token for token, piece in enumerate(marked)}
    merges: list[tuple[float, int, int, tuple[str, str]]] = []
    for piece, score in zip(marked, scores, strict=True):
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                merges.append((-score, vocab[left], vocab[right], (left, right)))
    merges.sort()
    inner = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[pair for *_, pair in merges], byte_fallback=True, fuse_unk=True)
    )
    spaces = normalizers.Replace(" ", "▁")
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if space_prefix else spaces
    _add_tokens(inner, marked, control, added)
    if bos is not None:
        _begin_with(inner, marked[bos], bos)
    token_bytes = {token: sentencepiece_bytes(piece) for token, piece in enumerate(marked)}
    return Tokenizer(_Encoder(inner), Vocabulary(token_bytes, control), template)


def _add_tokens(
    inner: tokenizers.Tokenizer, pieces: Sequence[str], control: Sequence[int], added: Sequence[int]
) -> None:
    """Tells the splitter which pieces are found whole in a text, before anything else."""
    inner.add_special_tokens([AddedToken(pieces[token], special=True, normalized=False) for token in control])
    inner.add_tokens([AddedToken(pieces[token], special=False, normalized=False) for token in added])


def _begin_with(inner: tokenizers.Tokenizer, piece: str, token: int) -> None:
    inner.post_processor = processors.TemplateProcessing(single=[piece, "$A"], special_tokens=[(piece, token)])


def _vocabulary(inner: tokenizers.Tokenizer, decoder: dict[str, Any] | None) -> Vocabulary:
    """Bytes of each token by what the file's decoder does with pieces."""
    steps = [] if decoder is None else [decoder, *decoder.get("decoders", [])]
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        to_bytes = byte_level_bytes
    elif kinds & {"ByteFallback", "Metaspace"}:
        to_bytes = sentencepiece_bytes
    else:
        raise ValueError(f"tokenizer.json: supported decoders are ByteLevel, ByteFallback, Metaspace, got {kinds}")
    token_bytes = {token: to_bytes(piece) for piece, token in inner.get_vocab(with_added_tokens=True).items()}
    added = inner.get_added_tokens_decoder()
    token_bytes.update({token: value.content.encode() for token, value in added.items()})
    return Vocabulary(token_bytes, [token for token, value in added.items() if value.special])


def _template_of_folder(folder: Path) -> ChatTemplate | None:
    """chat_template.jinja, or tokenizer_config.json's; of several named ones the one called "default"."""
    path = folder / "tokenizer_config.json"
    values = json.loads(path.read_text()) if path.is_file() else {}
    source = values.get("chat_template")
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if (folder / "chat_template.jinja").is_file():
        source = (folder / "chat_template.jinja").read_text()
    if source is None:
        return None
    special = {}
    for name, value in values.items():
        if name.endswith("_token") and value:
            special[name] = value["content"] if isinstance(value, dict) else value
    return ChatTemplate(source, {name: text for name, text in special.items() if isinstance(text, str)})


def _from_latin1(piece: str) -> str:
    """Pieces whose bytes were written as Latin-1 characters."""
    return piece.encode("latin-1").decode("utf-8")
