"""The house rules: sizes, layers, settings, light imports, and files that say what they are."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("mmcompile", "passes", "targets", "models", "examples", "benchmarks", "tests")
FILE_LINES, FUNCTION_LINES = 400, 60
# The only files that may read the environment: where the cache lies, a tool's own variable, a child's environment.
ENVIRONMENT = {
    "targets/_cache.py",
    "targets/_compile_pool.py",
    "targets/_disassemble.py",
    "targets/_interpret.py",
}
MACHINE_PATH = re.compile(r"[\"'`\s(](/work/|/home/|/Users/|/root/|/tmp/|/mnt/|\.\./shared)")


def _find_files() -> list[Path]:
    """Python files by their real place: mmcompile/passes and the like are links."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return sorted({path.resolve() for path in files if "__pycache__" not in path.parts})


FILES = _find_files()
PRODUCT = [path for path in FILES if path.relative_to(ROOT).parts[0] not in ("tests", "benchmarks")]


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_files_are_short():
    long = {_name(path): n for path in FILES if (n := len(path.read_text().splitlines())) > FILE_LINES}
    assert not long


def _functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(_parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield f"{_name(path)}:{node.name}", node.end_lineno - node.body[0].lineno + 1


def test_functions_are_short():
    """Lines of the body: a signature of thirty documented options is no complexity."""
    assert not {name: lines for path in FILES for name, lines in _functions(path) if lines > FUNCTION_LINES}


def test_every_module_says_what_it_is():
    silent = [_name(path) for path in FILES if not ast.get_docstring(_parse(path)) and path.name != "conftest.py"]
    assert not [name for name in silent if not name.startswith("tests/")]


def test_public_functions_and_classes_have_docstrings():
    silent = []
    for path in PRODUCT:
        if path.relative_to(ROOT).parts[0] == "models" or "_kernels" in path.parts:
            continue
        for node in _parse(path).body:
            public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
            rule_part = public and node.name.startswith(("pattern", "replacement", "guard"))
            if public and not rule_part and not ast.get_docstring(node):
                silent.append(f"{_name(path)}:{node.name}")
    assert not silent


def test_passes_targets_and_models_describe_themselves():
    from mmcompile.core.discover import list_names, load_module

    for folder in ("clean", "standardise", "quant", "fusion", "layout", "decode"):
        for name in list_names(f"passes.{folder}"):
            module = load_module(f"passes.{folder}", name)
            assert hasattr(module, "RULES") or module.DESCRIPTION, name
            assert module.__doc__, name
    for name in list_names("targets"):
        assert load_module("targets", name).TARGET.spec.description, name
    for name in list_names("models"):
        module = load_module("models", name)
        assert module.__doc__, name
        assert all(callable(getattr(module, part)) for part in ("build", "find_weights")), name
        assert module.WEIGHTS_ADVICE, name


def test_the_environment_is_read_in_few_places():
    found = {_name(path) for path in PRODUCT if re.search(r"os\.environ|os\.getenv", path.read_text())}
    assert found <= ENVIRONMENT


def _strings(path: Path) -> Iterator[tuple[int, str]]:
    """Comments and strings of a file, with their lines."""
    with path.open("rb") as stream:
        for token in tokenize.tokenize(stream.readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING):
                yield token.start[0], token.string


def test_no_paths_of_a_machine():
    others = [ROOT / name for name in ("Makefile", "README.md", "CONTRIBUTING.md", "pyproject.toml", ".ci/run")]
    found = [f"{_name(path)}:{line}" for path in PRODUCT for line, text in _strings(path) if MACHINE_PATH.search(text)]
    found += [_name(path) for path in others if MACHINE_PATH.search(path.read_text())]
    assert not found


def test_targets_are_asked_for_features_not_names():
    outside = [path for path in PRODUCT if path.relative_to(ROOT).parts[0] != "targets"]
    assert not [_name(path) for path in outside if re.search(r"spec\.name\s*(==|!=|in\b)", path.read_text())]


def test_imports_flow_one_way():
    done = subprocess.run([Path(sys.executable).parent / "lint-imports"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("mmcompile", {"torch", "triton", "transformers", "rich"}),
        ("mmcompile.core.spec", {"torch", "triton", "transformers"}),
        ("mmcompile.runtime", {"triton", "transformers", "gguf", "onnx", "mmcompile.driver", "mmcompile.capture"}),
        ("mmcompile.cli", {"torch", "triton", "transformers", "mmcompile.driver"}),
    ],
)
def test_imports_are_light(module, heavy):
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not heavy & set(done.stdout.split())


def test_links_lead_to_the_top_level_folders():
    for name in ("passes", "targets", "models"):
        link = ROOT / "mmcompile" / name
        assert link.is_symlink()
        assert link.readlink() == Path("..") / name
