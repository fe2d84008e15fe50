"""The application: its verbs, and the one place that turns an error into a sentence and an exit code."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer

import mmcompile
from mmcompile.cli import build, export, inspect, lists, quantize, run, tune, verify
from mmcompile.cli.console import print_error, print_json
from mmcompile.core.errors import MMError, unknown_name

# typer carries its own copy of click; its public BadParameter leads to the base class of all usage errors.
_UsageProblem: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
_STOPPED: dict[Any, str] = {128 + signal.SIGINT: "interrupted", 128 + signal.SIGTERM: "terminated"}
_EPILOG = (
    "[b]Start here[/b]: mmcompile build smollm2-135m --target cpu -o out, then mmcompile run out --prompt 'Hello'. "
    "Every verb has --help with examples, and --json for scripts."
)

app = typer.Typer(
    name="mmcompile",
    help="Lower a model to kernels for several targets, pack them, and run them without a compiler.",
    epilog=_EPILOG,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (build, quantize, export, run, inspect, verify, tune, lists):
    module.register(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"mmcompile {mmcompile.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        context.get_help()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 0, that of the MMError, 2 for wrong usage, 130 when interrupted.

    An error is one sentence on stderr; with --json stdout holds it as a document too.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with _exit_on_signals():
            return int(app(words, prog_name="mmcompile", standalone_mode=False) or 0)
    except SystemExit as stop:
        if stop.code not in _STOPPED:
            raise
        word = _STOPPED[stop.code]
        return _fail(words, f"{word}.", stop.code, {"what": word})
    except MMError as error:
        document = {"what": error.what, "where": error.where, "fix": error.fix}
        return _fail(words, str(error), error.exit_code, document)
    except _UsageProblem as problem:
        sentence = _describe(problem)
        return _fail(words, sentence, problem.exit_code, {"what": sentence})
    except BrokenPipeError:
        # The reader (head, less) has enough; nothing may be flushed into the closed pipe at exit.
        sys.stdout = None  # type: ignore[assignment]
        return 0
    except Exception as error:
        what = f"internal error, {type(error).__name__}: {error}"
        sentence = f"{what}; run again with --debug and report the traceback."
        return _fail(words, sentence, MMError.exit_code, {"what": what})


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Ctrl-C and a termination both unwind the build, which cleans up, and end with 128 + the signal's number.

    SystemExit and not KeyboardInterrupt: when that one passes through an ``exec`` of text (torch and sympy have
    some), ``python -m`` kills itself by SIGINT at the end whatever caught it.
    """

    def stop(number: int, _frame: object) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _describe(problem: Any) -> str:
    """The sentence of a usage error; an unknown option gets the closest known one."""
    option = getattr(problem, "option_name", None)
    if option is None or not hasattr(problem, "possibilities"):
        return str(problem.format_message())
    known = [name for parameter in problem.ctx.command.params for name in parameter.opts]
    return str(unknown_name("option", option, known))


def _fail(words: list[str], sentence: str, code: int, document: dict[str, str]) -> int:
    if "--debug" in words and code not in _STOPPED:
        traceback.print_exc()
    if "--json" in words:
        print_json({"error": document | {"exit_code": code}})
    print_error(sentence)
    return code
