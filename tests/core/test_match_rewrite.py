"""Patterns and rules: what matches, what must not and why, and which rules are refused when they are made."""

import pytest
import torch
from torch import nn

from mmcompile.capture.export import capture_module
from mmcompile.core.errors import LoweringError
from mmcompile.core.match import Matcher
from mmcompile.core.rewrite import Rewrite, apply_rules
from mmcompile.core.runner import count_operations

MM, ATEN = torch.ops.mm, torch.ops.aten
ADD, MUL, SUB, RELU = ATEN.add.Tensor, ATEN.mul.Tensor, ATEN.sub.Tensor, ATEN.relu.default


def graph_of(function, *shapes):
    """Export ``function`` over fp32 inputs a, b, ... of the given shapes."""
    names = "abcdef"[: len(shapes)]

    class Model(nn.Module):
        def forward(self, a, b=None, c=None, d=None):
            return function(*(v for v in (a, b, c, d) if v is not None))

    inputs = {n: torch.randn(*s, generator=torch.Generator().manual_seed(i)) for i, (n, s) in
              enumerate(zip(names, shapes, strict=True))}  # fmt: skip
    return capture_module(Model(), inputs).graph_module


def find(graph_module, target):
    return list(graph_module.graph.find_nodes(op="call_function", target=target))


def rule(pattern, replacement, **more):
    return Rewrite("rule", pattern, replacement, **{"enough": 1} | more)


FUSED = rule(
    lambda x, r, w, eps: MM.rms_norm.default(ADD(x, r), w, eps),
    lambda x, r, w, eps: MM.add_rms_norm.default(x, r, w, eps)[0],
)


def norm_of_sum(a, b, w):
    return MM.rms_norm(a + b, w, 1e-5)


def test_match_and_replace_keeps_the_value():
    graph = graph_of(norm_of_sum, (2, 8), (2, 8), (8,))
    inputs = [torch.randn(2, 8), torch.randn(2, 8), torch.randn(8)]
    (want,) = graph(*inputs) if isinstance(graph(*inputs), tuple | list) else (graph(*inputs),)
    result = apply_rules(graph, [FUSED])
    assert len(result.matches) == 1 and not result.near_misses
    assert "test_match_rewrite.py" in result.matches[0].source
    assert count_operations(graph)["mm.add_rms_norm"] == 1
    assert "mm.rms_norm" not in count_operations(graph)
    have = graph(*inputs)
    assert torch.equal(have[0] if isinstance(have, tuple | list) else have, want)


def test_commutative_operands_match_in_both_orders():
    pattern = rule(lambda x, y: ADD(RELU(x), y), lambda x, y: ADD(y, RELU(x)))
    for function in (lambda a, b: a.relu() + b, lambda a, b: b + a.relu()):
        assert len(apply_rules(graph_of(function, (2,), (2,)), [pattern]).matches) == 1
    minus = rule(lambda x, y: SUB(RELU(x), y), lambda x, y: SUB(RELU(x), y))
    assert not apply_rules(graph_of(lambda a, b: b - a.relu(), (2,), (2,)), [minus]).matches


def test_a_scaled_addition_is_not_an_addition():
    graph = graph_of(lambda a, b, w: MM.rms_norm(torch.add(a, b, alpha=2), w, 1e-5), (2, 8), (2, 8), (8,))
    result = apply_rules(graph, [FUSED])
    assert not result.matches
    assert result.near_misses[0].reason == "aten.add.Tensor has 2, the pattern wants 1"


def test_repeated_parameter_must_be_the_same_value():
    square = rule(lambda x: MUL(RELU(x), RELU(x)), lambda x: ATEN.square.default(RELU(x)))
    assert len(apply_rules(graph_of(lambda a: a.relu() * a.relu(), (2,)), [square]).matches) == 1
    result = apply_rules(graph_of(lambda a, b: a.relu() * b.relu(), (2,), (2,)), [square])
    assert not result.matches
    assert "x is a in one place and b in another" in result.near_misses[0].reason


def test_one_node_in_two_places_of_the_pattern():
    square = rule(lambda x, y: MUL(RELU(x), RELU(y)), lambda x, y: RELU(MUL(x, y)))

    def function(a):
        b = a.relu()
        return b * b

    graph = graph_of(function, (2,))
    assert len(apply_rules(graph, [square]).matches) == 1
    assert count_operations(graph) == {"aten.mul.Tensor": 1, "aten.relu.default": 1}


def test_repeated_literal_must_have_the_same_type():
    both = rule(
        lambda x, w, n: MM.rms_norm.default(MM.rms_norm.default(x, w, n, 0.0, True), w, 1e-5, n, True),
        lambda x, w, n: MM.rms_norm.default(x, w, n),
    )
    one = graph_of(lambda a, w: MM.rms_norm(MM.rms_norm(a, w, 0.5), w, 1e-5, 0.5), (2, 8), (8,))
    assert len(apply_rules(one, [both]).matches) == 1
    other = graph_of(lambda a, w: MM.rms_norm(MM.rms_norm(a, w, 0.25), w, 1e-5, 0.5), (2, 8), (8,))
    assert "n is 0." in apply_rules(other, [both]).near_misses[0].reason


def test_literal_mismatch_names_operation_and_values():
    fixed = rule(
        lambda x, r, w: MM.rms_norm.default(ADD(x, r), w, 1e-6),
        lambda x, r, w: MM.add_rms_norm.default(x, r, w, 1e-6)[0],
    )
    (miss,) = apply_rules(graph_of(norm_of_sum, (2, 8), (2, 8), (8,)), [fixed]).near_misses
    assert miss.reason == "mm.rms_norm has 1e-05, the pattern wants 1e-06"
    assert "test_match_rewrite.py:" in miss.source


def test_defaults_and_given_defaults_are_the_same():
    explicit = graph_of(lambda a, b, w: MM.rms_norm(a + b, w, 1e-5, 0.0, True), (2, 8), (2, 8), (8,))
    assert len(apply_rules(explicit, [FUSED]).matches) == 1


def test_interior_value_used_outside_is_refused():
    graph = graph_of(lambda a, b, w: (MM.rms_norm(a + b, w, 1e-5), (a + b).relu()), (2, 8), (2, 8), (8,))
    (total, *others) = find(graph, ADD)
    for other in others:  # what common-subexpression elimination does
        other.replace_all_uses_with(total)
    result = apply_rules(graph, [FUSED])
    assert not result.matches
    assert result.near_misses[0].reason == "its value is also used by relu_default, outside the pattern"


TWO_ROOTS = rule(
    lambda x, y: (RELU(MUL(x, y)), ATEN.neg.default(MUL(x, y))),
    lambda x, y: (ATEN.abs.default(x), ATEN.abs.default(y)),
)


def test_second_root_is_found_beside_the_first():
    graph = graph_of(lambda a, b: ((a * b).relu(), -(a * b)), (2,), (2,))
    assert len(apply_rules(graph, [TWO_ROOTS]).matches) == 1
    assert count_operations(graph) == {"aten.abs.default": 2}


def test_missing_second_root_is_reported():
    result = apply_rules(graph_of(lambda a, b: (a * b).relu(), (2,), (2,)), [TWO_ROOTS])
    assert not result.matches
    assert result.near_misses[0].reason == "no second result aten.neg.default beside it"


def test_matcher_gives_the_bindings():
    graph = graph_of(norm_of_sum, (2, 8), (2, 8), (8,))
    matcher = Matcher(FUSED.traced[0])
    bindings = matcher.match(find(graph, MM.rms_norm.default)[0])
    names = {k.target: getattr(v, "name", v) for k, v in bindings.values.items() if k.op == "placeholder"}
    assert names == {"x": "a", "r": "b", "w": "c", "eps": 1e-5}
    assert [n.name for n in bindings.calls()] == ["rms_norm_default", "add_tensor"]


def test_input_computed_after_the_first_use_is_refused():
    both = rule(
        lambda x, y, z: (RELU(MUL(x, y)), ADD(MUL(x, y), z)),
        lambda x, y, z: (ATEN.abs.default(x), ADD(MUL(x, y), z)),
    )

    def function(a, b):
        product = a * b
        return product + product.relu().exp()  # z depends on the other root

    result = apply_rules(graph_of(function, (2,), (2,)), [both])
    assert not result.matches
    assert (
        result.near_misses[0].reason == "an input of the fused operation is computed after the first use of its result"
    )


def test_a_write_does_not_move_past_a_reader():
    """The second root needs a late input, so that the fused write would come after the read of the cache."""

    late = rule(
        lambda k, v, cache, slots, y: (MM.insert_kv.default(k, v, cache, slots), MUL(ATEN.exp.default(v), y)),
        lambda k, v, cache, slots, y: (MM.insert_kv.default(k, v, cache, slots), MUL(ATEN.exp.default(v), y)),
    )

    class Model(nn.Module):
        def forward(self, k, cache, slots):
            return k.exp() * cache.sum()

    inputs = {"k": torch.randn(2, 1, 4), "cache": torch.zeros(1, 1, 4, 8), "slots": torch.tensor([0, 1])}
    graph = capture_module(Model(), inputs).graph_module  # capture makes writes functional, hence the insertion here
    k, cache, slots = graph.graph.find_nodes(op="placeholder")
    with graph.graph.inserting_after(slots):
        graph.graph.call_function(MM.insert_kv.default, (k, k, cache, slots)).meta["val"] = None
    result = apply_rules(graph, [late])
    assert not result.matches
    assert result.near_misses[0].reason == "it would move a write past sum_default, which uses the same tensor"


def test_guard_refusal_is_a_near_miss():
    guarded = rule(FUSED.pattern, FUSED.replacement, guard=lambda values: f"eps is {values['eps']}")
    (miss,) = apply_rules(graph_of(norm_of_sum, (2, 8), (2, 8), (8,)), [guarded]).near_misses
    assert (miss.rule, miss.reason) == ("rule", "eps is 1e-05")


def test_near_miss_disappears_where_a_variant_matches():
    fixed = rule(
        lambda x, r, w: MM.rms_norm.default(ADD(x, r), w, 1e-6), lambda x, r, w: MM.rms_norm.default(x + r, w, 0.0)
    )
    result = apply_rules(graph_of(norm_of_sum, (2, 8), (2, 8), (8,)), [fixed, FUSED])
    assert len(result.matches) == 1 and not result.near_misses


def test_a_rule_that_drops_eps_is_refused():
    with pytest.raises(LoweringError, match="drops the attribute eps.*test_match_rewrite.py: rule rule.*irrelevant"):
        rule(FUSED.pattern, lambda x, r, w: MM.add_rms_norm.default(x, r, w, 1e-6)[0])
    with pytest.raises(LoweringError, match="drops the attribute eps"):
        rule(FUSED.pattern, lambda x, r, w, eps: MM.add_rms_norm.default(x, r, w, 1e-6)[0])
    with pytest.raises(LoweringError, match="drops the attribute eps"):  # without a reason
        rule(FUSED.pattern, lambda x, r, w: MM.add_rms_norm.default(x, r, w, 1e-6)[0], irrelevant=(("eps", ""),))
    rule(FUSED.pattern, lambda x, r, w: MM.add_rms_norm.default(x, r, w, 1e-6)[0], irrelevant=(("eps", "a test"),))


def test_a_rule_that_reads_what_the_pattern_does_not_bind_is_refused():
    with pytest.raises(LoweringError, match="unknown to the pattern"):
        rule(lambda x: RELU(x), lambda x, y: ADD(x, y))
    with pytest.raises(LoweringError, match="unknown to the pattern"):
        rule(lambda x, y: RELU(x), lambda x, y: ADD(x, y))


def test_a_rule_that_loses_a_write_is_refused():
    with pytest.raises(LoweringError, match="the pattern writes cache, the replacement nothing"):
        rule(
            lambda k, v, cache, slots: MM.insert_kv.default(k, v, cache, slots),
            lambda k, v, cache, slots: MM.gather_last.default(k + v + cache, slots),
        )


def test_a_pattern_with_an_unreachable_call_is_refused():
    def pattern(k, v, cache, slots):
        MM.insert_kv.default(k, v, cache, slots)
        return RELU(k)

    with pytest.raises(LoweringError, match="insert_kv_default for nobody.*return it as a root"):
        rule(pattern, pattern)
