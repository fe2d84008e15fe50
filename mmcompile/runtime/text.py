"""Text in and out: tokenizer.json through tokenizers, chat templates in a sandbox, incremental decoding."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from mmcompile.core.errors import ArtifactError, RequestError, ToolchainError
from mmcompile.core.plan import ModelSpec

_REPLACEMENT = "\ufffd"


def _open_tokenizer(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ToolchainError("text needs the package tokenizers", fix="run `pip install 'mmcompile[hf]'`") from None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises the bare Exception class
        raise ArtifactError(f"not a tokenizer ({error})", where=str(path), fix="rebuild the artifact") from None


class TextCodec:
    """Tokenizer and chat template of an artifact. Raises ArtifactError if it holds no tokenizer."""

    def __init__(self, root: Path, model: ModelSpec) -> None:
        if model.tokenizer is None:
            raise ArtifactError(
                "the artifact holds no tokenizer", where=str(root), fix="pass token ids instead of text"
            )
        self._model = model
        self._tokenizer = _open_tokenizer(root / model.tokenizer)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of ``text``; with ``special`` the tokenizer adds what it adds to a prompt (e.g. BOS)."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental decoder."""
        return Detokenizer(self)

    def _token_text(self, token: int | None) -> str:
        return "" if token is None else self._tokenizer.id_to_token(token) or ""

    @cached_property
    def _template(self) -> Any:
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        if self._model.chat_template is None:
            raise RequestError("the model has no chat template", fix="pass the prompt as plain text")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        try:
            return environment.from_string(self._model.chat_template)
        except TemplateError as error:
            raise ArtifactError(f"the chat template does not parse ({error})", fix="rebuild the artifact") from None

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """Prompt text of a conversation: messages are {"role": ..., "content": ...}.

        The text holds its special tokens; encode it with ``special=False``. Raises RequestError if the model has no
        template or the template refuses the messages.
        """
        from jinja2 import TemplateError

        eos = self._model.eos_token_ids[0] if self._model.eos_token_ids else None
        try:
            text: str = self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                bos_token=self._token_text(self._model.bos_token_id),
                eos_token=self._token_text(eos),
            )
        except TemplateError as error:
            raise RequestError(f"the chat template refuses the messages ({error})", fix="change the messages") from None
        return text


def _to_json(value: Any, indent: int | None = None) -> str:
    """As chat templates expect it: no HTML escapes, unlike jinja2's own filter."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


class Detokenizer:
    """Turns tokens into text as they come; a character that spans tokens is held back until it is complete.

    The pieces joined (with ``flush`` at the end) are the decoded whole.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._ids: list[int] = []
        self._begin = self._read = 0

    def _pending(self) -> str:
        """Text of the tokens after ``_read``, decoded together with those before, as spacing depends on them."""
        before = self._codec.decode(self._ids[self._begin : self._read])
        return self._codec.decode(self._ids[self._begin :])[len(before) :]

    def push(self, token: int) -> str:
        """New text after ``token``, "" while it ends in an incomplete character."""
        self._ids.append(token)
        text = self._pending()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        self._begin, self._read = self._read, len(self._ids)
        return text

    def flush(self) -> str:
        """What is still held back when no more tokens come (U+FFFD for a character that was cut off)."""
        text = self._pending()
        self._begin = self._read = len(self._ids)
        return text
