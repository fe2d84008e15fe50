"""The verb ``run``: text or token ids in, text or token ids out."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mmcompile.cli.console import Debug, Json, make_console, print_json
from mmcompile.core.errors import RequestError, UsageError

_EPILOG = """[b]Examples[/b]

mmcompile run out --prompt "What is the capital of France?"

mmcompile run out --prompt-file question.txt --system "Answer in one word." --stats

mmcompile run out --prompt "Once upon a time" --raw --temperature 0.8 --top-p 0.95 --seed 7

mmcompile run out --prompt "Hello" --prompt "Tell me a joke"     (served as one batch)

mmcompile run out --ids 1,2,3 --max-new-tokens 8 --json          (no tokenizer needed)

mmcompile run out --ids 1,2,3 --random-weights 0                 (built with --weights none)
"""


def register(app: typer.Typer) -> None:
    """Add the verb to the application."""
    app.command("run", epilog=_EPILOG)(run)


@dataclass(frozen=True)
class Answer:
    """A prompt and what came of it; ``text`` is None without a tokenizer."""

    prompt: str | list[int]
    prompt_tokens: int
    tokens: list[int]
    text: str | None
    reason: str | None


def run(
    artifact: Annotated[Path, typer.Argument(help="A directory that `mmcompile build` wrote.")],
    prompt: Annotated[list[str] | None, typer.Option(help="Text; several are served as one batch.")] = None,
    prompt_file: Annotated[list[Path] | None, typer.Option(help="File with a prompt; repeat for several.")] = None,
    ids: Annotated[list[str] | None, typer.Option(help="Token ids instead of text.", metavar="1,2,3")] = None,
    device: Annotated[
        str, typer.Option(help="auto: a GPU that the artifact has kernels for, else cpu. Or cpu, cuda, hip.")
    ] = "auto",
    target: Annotated[str | None, typer.Option(help="Which target of the artifact.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Stop after this many tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Choose among the k likeliest; 0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="Choose among the likeliest of this mass; 1 is off.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of sampling: the same seed gives the same tokens.")] = 0,
    random_weights: Annotated[
        int | None,
        typer.Option(help="Seed of random weights, for an artifact built with --weights none.", min=0, metavar="SEED"),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message of the chat template.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Tokens per second and memory, on stderr.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run an artifact: stream the answer to a prompt. Needs no compiler."""
    from mmcompile.runtime import Engine, SamplingParams, load

    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    prompts = _collect_prompts(prompt, prompt_file, ids)
    started = time.perf_counter()
    engine = load(
        artifact,
        target=target,
        device=device,
        seed=seed,
        random_weights=random_weights,  # type: ignore[arg-type]
    )
    load_seconds = time.perf_counter() - started
    if random_weights is not None:
        note = f"the weights are random (seed {random_weights}): the answer means nothing"
        make_console(stderr=True).print(note, style="yellow", markup=False)
    try:
        if not isinstance(engine, Engine):
            raise RequestError(
                "the artifact holds a module, which has no text to generate",
                where=str(artifact),
                fix="run it from Python: mmcompile.runtime.load(path).forward(...)",
            )
        encoded = [_encode(engine, item, raw, system) for item in prompts]
        started = time.perf_counter()
        show = not as_json and len(prompts) == 1
        answers = _stream(engine, prompts, encoded, params) if show else _batch(engine, prompts, encoded, params)
        seconds = time.perf_counter() - started
        statistics = _measure(engine, answers, load_seconds, seconds)
    finally:
        engine.close()
    _print_answers(answers, statistics, as_json=as_json, printed=show, stats=stats)


def _collect_prompts(texts: list[str] | None, files: list[Path] | None, ids: list[str] | None) -> list[str | list[int]]:
    prompts: list[str | list[int]] = [*(texts or ()), *map(_read_prompt, files or ()), *map(_parse_ids, ids or ())]
    if not prompts:
        raise UsageError("there is no prompt", fix='pass --prompt "...", --prompt-file FILE or --ids 1,2,3')
    return prompts


def _read_prompt(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UsageError(f"cannot read the prompt: {reason}", where=str(path), fix="name a text file") from None


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise UsageError(f"--ids {text!r} is not a list of integers", fix="write e.g. --ids 1,2,3") from None


def _encode(engine: Any, prompt: str | list[int], raw: bool, system: str | None) -> list[int]:
    """Token ids of a prompt, through the chat template where the model has one and ``raw`` does not forbid it."""
    templated = engine.manifest.model.chat_template is not None and not raw
    if system is not None and (not templated or isinstance(prompt, list)):
        raise RequestError("--system needs the chat template", fix="drop --raw and --ids, or use a model that has one")
    if isinstance(prompt, list):
        return prompt
    if not templated:
        return list(engine.text.encode(prompt))
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": prompt})
    return list(engine.text.encode(engine.text.render_chat(messages), special=False))


def _stream(engine: Any, prompts: list[Any], encoded: list[list[int]], params: Any) -> list[Answer]:
    """Answer the only prompt, printing as it comes."""
    textual = engine.manifest.model.tokenizer is not None
    tokens: list[int] = []
    text, reason = "", None
    for chunk in engine.stream(encoded[0], params):
        if chunk.token is not None:
            tokens.append(chunk.token)
        piece = chunk.text if textual else f"{chunk.token} " if chunk.token is not None else ""
        print(piece, end="", flush=True)
        text, reason = text + piece, chunk.reason
    print()
    return [Answer(prompts[0], len(encoded[0]), tokens, text if textual else None, reason)]


def _batch(engine: Any, prompts: list[Any], encoded: list[list[int]], params: Any) -> list[Answer]:
    """Answer all prompts together."""
    results = engine.generate(encoded, params)
    return [
        Answer(prompt, len(ids), result.tokens, result.text, result.reason)
        for prompt, ids, result in zip(prompts, encoded, results, strict=True)
    ]


def _measure(engine: Any, answers: list[Answer], load_seconds: float, seconds: float) -> dict[str, Any]:
    generated = sum(len(answer.tokens) for answer in answers)
    return {
        "load_seconds": round(load_seconds, 3),
        "generate_seconds": round(seconds, 3),
        "prompt_tokens": sum(answer.prompt_tokens for answer in answers),
        "new_tokens": generated,
        "tokens_per_second": round(generated / max(seconds, 1e-9), 2),
        "engine": engine.describe(),
    }


def _print_answers(
    answers: list[Answer], statistics: dict[str, Any], *, as_json: bool, printed: bool, stats: bool
) -> None:
    if as_json:
        print_json({"answers": [vars(answer) for answer in answers], "statistics": statistics})
        return
    console = make_console()
    for index, answer in enumerate(() if printed else answers):
        console.print(f"[{index + 1}] {answer.prompt}", style="bold", markup=False, soft_wrap=True)
        console.print(answer.text if answer.text is not None else answer.tokens, markup=False, soft_wrap=True)
    cut = [answer.reason for answer in answers if answer.reason in ("context", "out_of_pages")]
    errors = make_console(stderr=True)
    if cut:
        errors.print(f"ended early: {', '.join(cut)}", style="yellow", markup=False)
    if stats:
        engine = statistics["engine"]
        where = engine["target"] + (f" ({engine['architecture']})" if engine["architecture"] else "")
        errors.print(
            f"{statistics['new_tokens']} tokens in {statistics['generate_seconds']:.2f} s "
            f"({statistics['tokens_per_second']:.1f} tokens/s, prompt of {statistics['prompt_tokens']} included) "
            f"on {where}, loaded in {statistics['load_seconds']:.2f} s",
            markup=False,
        )
