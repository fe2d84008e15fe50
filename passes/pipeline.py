"""THE ordered list of passes. Phases: clean, standardise, quantize, fuse, layout; then the decode copy."""

from __future__ import annotations

from types import ModuleType

from torch import fx

from mmcompile.core.discover import list_names, load_module
from mmcompile.core.passes import Pass, PassContext, PassFunction, PassResult
from mmcompile.core.rewrite import Rewrite, apply_rules


def whole_graph(phase: str, folder: str, name: str) -> Pass:
    """A pass written as a function ``run`` over the whole graph."""
    module = load_module(folder, name)
    return Pass(name, phase, module.run, module.DESCRIPTION, module.EFFECT)


def rule_file(phase: str, folder: str, name: str) -> Pass:
    """A pass written as a list of rewrite rules, described by the first line of its file: pattern, gap, purpose."""
    module = load_module(folder, name)
    parts = (module.__doc__ or name).splitlines()[0].rstrip(". ").split("     ")
    description = "; ".join(" ".join(part.split()) for part in parts)
    return Pass(name, phase, _apply(module.RULES), description, getattr(module, "EFFECT", "bounded"))


def _apply(rules: list[Rewrite]) -> PassFunction:
    def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
        return apply_rules(graph_module, rules)

    return run


def rule_folder(phase: str, folder: str) -> list[Pass]:
    """Every rule file of a folder, largest pattern first, ties by name: a new fusion is one new file."""
    modules: dict[str, ModuleType] = {n: load_module(folder, n) for n in list_names(folder)}
    with_rules = [n for n, m in modules.items() if hasattr(m, "RULES")]
    return [rule_file(phase, folder, n) for n in sorted(with_rules, key=lambda n: (-_size(modules[n]), n))]


def _size(module: ModuleType) -> int:
    """Calls in the largest pattern of a rule file."""
    return max(sum(n.op == "call_function" for n in rule.traced[0].graph.nodes) for rule in module.RULES)


def list_passes(kind: str = "decoder", quantization: str = "none", *, stored: str = "") -> list[Pass]:
    """The pipeline.

    ``kind``: "decoder", or "module" (no positions, no KV cache). ``quantization``: "none" or a file of passes/quant.
    ``stored``: the scheme that takes over what the checkpoint holds quantized where none is asked for, "" if it holds
    nothing quantized.
    """
    decoder = kind == "decoder"
    scheme = stored if quantization == "none" and stored else quantization
    clean, standardise, layout = "passes.clean", "passes.standardise", "passes.layout"
    return [
        whole_graph("clean", clean, "drop_no_ops"),
        whole_graph("clean", clean, "fold_literals"),
        whole_graph("clean", clean, "merge_common"),
        whole_graph("clean", clean, "spell_out_layer_norm"),
        whole_graph("standardise", standardise, "undo_exporter_spelling"),
        whole_graph("standardise", standardise, "match_linear"),
        rule_file("standardise", standardise, "match_embedding"),
        whole_graph("standardise", standardise, "match_rms_norm"),
        *([whole_graph("standardise", standardise, "match_rope")] if decoder else []),
        *([whole_graph("standardise", standardise, "match_block_sparse")] if decoder else []),
        *([whole_graph("standardise", standardise, "match_attention")] if decoder else []),
        whole_graph("standardise", standardise, "match_swiglu_oai"),
        whole_graph("standardise", standardise, "match_swiglu"),
        whole_graph("standardise", standardise, "match_moe"),
        *([whole_graph("standardise", standardise, "flatten_batch")] if decoder else []),
        whole_graph("standardise", clean, "cancel_views"),
        *([whole_graph("standardise", standardise, "insert_paged_cache")] if decoder else []),
        *([whole_graph("standardise", standardise, "insert_sparse_cache")] if decoder else []),
        *([whole_graph("standardise", standardise, "gather_last_token")] if decoder else []),
        *([] if scheme == "none" else [whole_graph("quantize", "passes.quant", scheme)]),
        whole_graph("fuse", "passes.fusion", "merge_linears"),
        *rule_folder("fuse", "passes.fusion"),
        *([whole_graph("layout", layout, "quantize_activations")] if scheme == "nvfp4" else []),
        whole_graph("layout", layout, "fold_constants"),
        *([whole_graph("layout", layout, "append_sampler")] if decoder else []),
    ]


def list_decode_passes() -> list[Pass]:
    """Passes over the copy of the finished graph that serves decode steps."""
    return [
        whole_graph("decode", "passes.decode", "one_token_per_sequence"),
        rule_file("decode", "passes.fusion", "add_rms_norm"),
        *rule_folder("decode", "passes.decode"),
    ]


def list_score_passes() -> list[Pass]:
    """Passes over the copy of the finished graph that scores texts (perplexity)."""
    return [whole_graph("score", "passes.layout", "score_every_token")]


def list_rules() -> list[str]:
    """Names of all rewrite rules, for --require."""
    folders = ("passes.standardise", "passes.fusion", "passes.decode")
    modules = [load_module(folder, name) for folder in folders for name in list_names(folder)]
    return sorted(rule.name for module in modules for rule in getattr(module, "RULES", ()))
