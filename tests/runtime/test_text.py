"""Tokenizer, chat template and the incremental detokenizer, through an artifact with a byte-level tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcompile.core.errors import ArtifactError, RequestError
from mmcompile.core.plan import ModelSpec
from mmcompile.runtime import Engine, SamplingParams, load
from mmcompile.runtime.text import TextCodec

tokenizers = pytest.importorskip("tokenizers")

TEMPLATE = """{{ bos_token }}{% for message in messages %}
{%- if message.role not in ['user', 'assistant'] %}{{ raise_exception('no role ' + message.role) }}{% endif %}
<{{ message.role }}>{{ message.content }}</{{ message.role }}>
{% endfor %}
{% if add_generation_prompt %}<assistant>{% endif %}"""


def write_tokenizer(path: Path, alphabet: list[str]) -> None:
    """Byte-level BPE over the given byte symbols, with <s> as token 0."""
    vocabulary = {token: i for i, token in enumerate(["<s>", *alphabet])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(path))


def spec(**changes: object) -> ModelSpec:
    fields = {"name": "t", "door": "t", "dtype": "float32", "vocab_size": 257, "max_context": 64}
    return ModelSpec(
        **(fields | {"tokenizer": "tokenizer.json", "bos_token_id": 0, "chat_template": TEMPLATE} | changes)
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    write_tokenizer(folder / "tokenizer.json", sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    return folder


@pytest.fixture(scope="module")
def codec(root: Path) -> TextCodec:
    return TextCodec(root, spec())


def test_encode_and_decode(codec: TextCodec) -> None:
    ids = codec.encode("héllo 🙂")
    assert ids[0] == 0 and codec.encode("héllo 🙂", special=False) == ids[1:]
    assert codec.decode(ids) == "héllo 🙂"


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=20))
def test_pieces_join_to_the_text(codec: TextCodec, text: str) -> None:
    decoder = codec.detokenizer()
    pieces = [decoder.push(token) for token in codec.encode(text)]
    assert "".join(pieces) + decoder.flush() == text
    assert all("\ufffd" not in piece for piece in pieces if "\ufffd" not in text)
    for piece in pieces:
        piece.encode("utf-8")


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(1, 256), max_size=25))
def test_pieces_join_to_the_decoded_whole_even_for_broken_bytes(codec: TextCodec, ids: list[int]) -> None:
    decoder = codec.detokenizer()
    assert "".join([decoder.push(token) for token in ids]) + decoder.flush() == codec.decode(ids)


def test_a_character_is_held_back_until_complete(codec: TextCodec) -> None:
    decoder = codec.detokenizer()
    pieces = [decoder.push(token) for token in codec.encode("a🙂b", special=False)]
    assert pieces == ["a", "", "", "", "🙂", "b"] and decoder.flush() == ""


def test_a_cut_off_character_appears_at_the_flush(codec: TextCodec) -> None:
    decoder = codec.detokenizer()
    assert [decoder.push(token) for token in codec.encode("🙂", special=False)[:2]] == ["", ""]
    assert decoder.flush() == "\ufffd"


def test_chat(codec: TextCodec) -> None:
    messages = [{"role": "user", "content": "<hi> & 'you'"}]
    assert codec.render_chat(messages) == "<s><user><hi> & 'you'</user>\n<assistant>"
    assert codec.render_chat(messages, add_generation_prompt=False) == "<s><user><hi> & 'you'</user>\n"
    with pytest.raises(RequestError, match="no role tool"):
        codec.render_chat([{"role": "tool", "content": ""}])


def test_templates_are_sandboxed(root: Path) -> None:
    attack = TextCodec(root, spec(chat_template="{{ messages.__class__.__mro__[1].__subclasses__() }}"))
    with pytest.raises(RequestError, match="refuses"):
        attack.render_chat([{"role": "user", "content": ""}])


def test_missing_pieces(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="holds no tokenizer"):
        TextCodec(root, spec(tokenizer=None))
    with pytest.raises(RequestError, match="no chat template"):
        TextCodec(root, spec(chat_template=None)).render_chat([])
    with pytest.raises(ArtifactError, match="does not parse"):
        TextCodec(root, spec(chat_template="{% if %}")).render_chat([])
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ArtifactError, match="not a tokenizer"):
        TextCodec(tmp_path, spec())


@pytest.fixture(scope="module")
def engine(make_artifact: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """The tiny decoder with a tokenizer of its 101 tokens: 60 of ASCII and 40 pieces of multi-byte characters."""
    folder = tmp_path_factory.mktemp("speaking")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    write_tokenizer(folder / "tokenizer.json", alphabet[32:92] + alphabet[120:160])
    return load(make_artifact(folder, model={"tokenizer": "tokenizer.json", "bos_token_id": 0}), device="cpu")


def test_generate_and_stream_text(engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=30, temperature=2.0, seed=3, ignore_eos=True)
    (result,) = engine.generate(["BCD"], params)
    chunks = list(engine.stream("BCD", params))
    assert result.text == engine.text.decode(result.tokens) and len(result.tokens) == 30
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert result.text != engine.generate([engine.text.encode("DCB")], params)[0].text


def test_text_needs_a_tokenizer(artifact: Path) -> None:
    engine = load(artifact, device="cpu")
    assert engine.generate([[1]], SamplingParams(max_new_tokens=2))[0].text is None
    with pytest.raises(ArtifactError, match="holds no tokenizer"):
        engine.generate(["text"])
    with pytest.raises(RequestError, match="single text"):
        engine.generate("text")
