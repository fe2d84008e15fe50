"""Every example runs."""

import importlib.util
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def _load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {
        "build_and_generate",
        "own_pass",
        "several_sequences",
        "tiny_mlp",
    }


def test_tiny_mlp():
    assert _load("tiny_mlp").main() <= 1e-5


def test_several_sequences(artifact):
    module = _load("several_sequences")
    tokens = module.main(artifact)
    for own, (_, params) in zip(tokens.values(), module.PROMPTS, strict=True):
        assert 1 <= len(own) <= params.max_new_tokens


def test_own_pass():
    cancel, count = _load("own_pass").main()
    assert not cancel.result.matches
    assert len(count.result.matches) == 9


def test_own_rule_applies():
    import torch

    from mmcompile.core.rewrite import apply_rules

    module = _load("own_pass")
    exported = torch.export.export(torch.nn.Identity(), (torch.randn(3),))
    graph_module = exported.module()
    node = next(n for n in graph_module.graph.nodes if n.op == "placeholder")
    (output,) = graph_module.graph.find_nodes(op="output")
    value = node.meta["val"]
    with graph_module.graph.inserting_before(output):
        once = graph_module.graph.call_function(torch.ops.aten.neg.default, (node,))
        twice = graph_module.graph.call_function(torch.ops.aten.neg.default, (once,))
    once.meta["val"] = twice.meta["val"] = value
    output.args = ((twice,),)
    assert len(apply_rules(graph_module, module.RULES).matches) == 1


@pytest.mark.slow
def test_build_and_generate():
    assert _load("build_and_generate").main("smollm2-tiny", [1, 2, 3])
