"""Run passes in order: count, time, clean up, verify against the graph before, dump, require; nothing is silent."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from mmcompile.core.errors import LoweringError, VerificationError
from mmcompile.core.graph import get_parameter, is_pure, make_graph_module, operation_name, print_graph
from mmcompile.core.passes import Pass, PassContext, PassResult

# A "bounded" pass may change results by at most this much of the largest magnitude, by the dtype of the result.
BOUNDED = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}
EXACT = ("bitwise", "drop_batch")
MINIMUM_SNR_DB = 8.0


@dataclass(frozen=True)
class Certificate:
    """Numerical evidence for one pass: what was compared and how far apart it was.

    ``max_error`` and ``scale`` (largest finite magnitude before the pass) are those of the tensor with the largest
    ratio of the two; ``snr_db`` is the smallest of all tensors, None if they are all equal.
    """

    kind: str
    max_error: float
    scale: float
    snr_db: float | None
    outputs: int
    seed: int


@dataclass
class PassReport:
    """Everything the runner knows of one executed pass."""

    index: int
    name: str
    phase: str
    description: str
    seconds: float
    nodes_before: int
    nodes_after: int
    operations: dict[str, int]
    result: PassResult = field(default_factory=PassResult)
    certificate: Certificate | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data for reports; times are left out so that equal builds give equal bytes."""
        data = asdict(self)
        del data["seconds"]
        return data


Inputs = Mapping[str, torch.Tensor]  # by placeholder name


def count_operations(graph_module: fx.GraphModule) -> dict[str, int]:
    """Number of calls by operation, most frequent first."""
    counts = Counter(operation_name(n.target) for n in graph_module.graph.nodes if n.op == "call_function")
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def run_passes(
    graph_module: fx.GraphModule,
    passes: Iterable[Pass],
    context: PassContext,
    *,
    make_inputs: Callable[[fx.GraphModule, int], Inputs] | None = None,
    required: Sequence[str] = (),
    disabled: Sequence[str] = (),
    dump: Path | None = None,
    progress: Callable[[PassReport], None] | None = None,
    seed: int = 0,
    first_index: int = 0,
) -> list[PassReport]:
    """Run ``passes`` on ``graph_module`` in place.

    Args:
        make_inputs: builds seeded inputs for the graph at hand; with it every pass is verified numerically against the
            graph before it. Without it only structure and shapes are checked.
        required: rule or pass names that must match at least once over the whole run.
        disabled: pass names to leave out.
        first_index: number of the first pass, for a run that continues another.
        dump: folder for NN-name.txt (the graph after the pass) and NN-name.json (matches, near misses, certificate).

    Raises: LoweringError for a required rule without a match, VerificationError for a pass that changed the result
        more than it declares.
    """
    reports: list[PassReport] = []
    for item in passes:
        if item.name in disabled:
            continue
        report = _run_one(graph_module, item, context, first_index + len(reports), make_inputs, seed)
        reports.append(report)
        if dump is not None:
            write_report(report, graph_module, dump)
        if progress is not None:
            progress(report)
    check_required(reports, required)
    return reports


def _run_one(
    graph_module: fx.GraphModule,
    item: Pass,
    context: PassContext,
    index: int,
    make_inputs: Callable[[fx.GraphModule, int], Inputs] | None,
    seed: int,
) -> PassReport:
    before = copy_graph(graph_module) if make_inputs is not None else None
    count_before = len(graph_module.graph.nodes)
    started = time.perf_counter()
    result = item.run(graph_module, context)
    check_order(graph_module, item.name)
    eliminate_dead_code(graph_module)
    check_structure(graph_module, item.name)
    seconds = time.perf_counter() - started
    certificate = None
    if before is not None and make_inputs is not None and _differ(before, graph_module):
        certificate = compare_graphs(before, graph_module, make_inputs, result.effect or item.effect, item.name, seed)
    return PassReport(
        index, item.name, item.phase, item.description, seconds, count_before, len(graph_module.graph.nodes),
        count_operations(graph_module), result, certificate,
    )  # fmt: skip


def _differ(before: fx.GraphModule, after: fx.GraphModule) -> bool:
    """True if the graphs or the tensors behind their parameters differ, whatever the pass reports."""
    if print_graph(before) != print_graph(after):
        return True
    names = [str(n.target) for n in after.graph.find_nodes(op="get_attr")]
    return any(get_parameter(before, n) is not get_parameter(after, n) for n in names)


def copy_graph(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Copy the graph; parameters are shared with the original, not copied."""
    graph = fx.Graph()
    values: dict[fx.Node, Any] = {}
    output = graph.graph_copy(graph_module.graph, values)
    graph.output(output)
    twin = make_graph_module(graph_module, graph)
    twin.meta = dict(graph_module.meta)
    return twin


def eliminate_dead_code(graph_module: fx.GraphModule) -> None:
    """Drop unused pure nodes and parameters that nobody reads any more."""
    for node in reversed(graph_module.graph.nodes):
        if not node.users and node.op != "placeholder" and is_pure(node):
            graph_module.graph.erase_node(node)
    graph_module.recompile()
    used = {str(n.target) for n in graph_module.graph.nodes if n.op == "get_attr"}
    parameters = graph_module.named_parameters(remove_duplicate=False)
    buffers = graph_module.named_buffers(remove_duplicate=False)
    for name in [n for n, _ in (*parameters, *buffers) if n not in used]:
        path, _, leaf = name.rpartition(".")
        owner = graph_module.get_submodule(path) if path else graph_module
        delattr(owner, leaf)


def check_order(graph_module: fx.GraphModule, pass_name: str) -> None:
    """Lint the graph: every value is defined before its use, every name is known."""
    try:
        graph_module.graph.lint()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise VerificationError(f"pass {pass_name} left a malformed graph: {reason}") from error


def check_structure(graph_module: fx.GraphModule, pass_name: str) -> None:
    """Demand a fake value on every node that makes one."""
    for node in graph_module.graph.nodes:
        if node.op in ("call_function", "get_attr", "placeholder") and "val" not in node.meta:
            raise VerificationError(f"pass {pass_name} left the node {node.name} without shape and dtype")


def compare_graphs(
    before: fx.GraphModule,
    after: fx.GraphModule,
    make_inputs: Callable[[fx.GraphModule, int], Inputs],
    effect: str,
    name: str,
    seed: int,
) -> Certificate:
    """Run both graphs on inputs made from one seed and compare their results and the state they write.

    A pass may add results after the others. Integer results (chosen tokens) jump where logits are nearly equal, so
    they are compared only if the pass declares itself bitwise.
    """
    inputs_before, inputs_after = make_inputs(before, seed), make_inputs(after, seed)
    with torch.no_grad():
        want, have = flatten(before(*inputs_before.values())), flatten(after(*inputs_after.values()))
    if len(have) < len(want):
        raise VerificationError(f"pass {name} left {len(have)} of {len(want)} results")
    if effect == "last_token":
        want = [t[-1:] for t in want]
    elif effect == "drop_batch":
        want = [t[0] for t in want]
    # State that both graphs write (the KV cache) is compared like a result.
    shared = [n for n, t in inputs_before.items() if t.is_floating_point() and n in inputs_after]
    pairs = [*zip(want, have, strict=False), *((inputs_before[n], inputs_after[n]) for n in shared)]
    certificates = [Certificate(effect, 0.0, 0.0, None, len(pairs), seed)]
    for w, h in pairs:
        if w.shape != h.shape or w.dtype != h.dtype:
            raise VerificationError(f"pass {name} changed a result from {w.shape} {w.dtype} to {h.shape} {h.dtype}")
        if effect not in EXACT and not w.is_floating_point():
            continue
        certificates.append(Certificate(effect, *measure_difference(w, h), len(pairs), seed))
        check_certificate(certificates[-1], w.dtype, name)
    worst = max(reversed(certificates), key=lambda c: c.max_error / max(c.scale, 1e-30))
    return replace(worst, snr_db=min((c.snr_db for c in certificates if c.snr_db is not None), default=None))


def measure_difference(want: torch.Tensor, have: torch.Tensor) -> tuple[float, float, float | None]:
    """Largest error, largest finite magnitude of ``want``, and signal-to-noise ratio in dB (None if equal).

    Equal infinities and two NaN agree; a NaN or infinity on one side only is an infinite error.
    """
    a, b = want.double(), have.double()
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, 0.0, a - b).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    finite = torch.where(a.isfinite(), a, 0.0)
    if bool(same.all()):
        return 0.0, float(finite.abs().amax()) if a.numel() else 0.0, None
    snr = 10.0 * torch.log10(finite.square().sum() / difference.square().sum())
    return float(difference.amax()), float(finite.abs().amax()), float(snr)


def check_certificate(certificate: Certificate, dtype: torch.dtype, name: str) -> None:
    """Raise VerificationError if a pass did more to the numbers than its declared effect allows."""
    if certificate.kind == "quantizing":
        if certificate.snr_db is not None and certificate.snr_db < MINIMUM_SNR_DB:
            raise VerificationError(f"pass {name} leaves a signal-to-noise ratio of only {certificate.snr_db:.1f} dB")
        return
    bound = 0.0 if certificate.kind in EXACT else BOUNDED.get(dtype, 0.0)
    if not certificate.max_error <= bound * max(certificate.scale, 1e-30):
        raise VerificationError(
            f"pass {name} declares itself {certificate.kind} but changed a result by {certificate.max_error:.3g} "
            f"(largest magnitude {certificate.scale:.3g}, allowed {bound:.1g} of it)",
            fix="run with --dump and compare the graphs before and after it",
        )


def flatten(value: Any) -> list[torch.Tensor]:
    """Tensors of a nested result, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [t for v in value for t in flatten(v)]
    return []


def check_required(reports: Sequence[PassReport], required: Sequence[str]) -> None:
    """Raise LoweringError if a required rule or pass never matched, with the reasons that were recorded for it."""
    matched = {m.rule for r in reports for m in r.result.matches} | {r.name for r in reports if r.result.matches}
    for name in required:
        if name not in matched:
            misses = [n for r in reports for n in r.result.near_misses if name in (n.rule, r.name)]
            first = misses[0] if misses else None
            raise LoweringError(
                f"the required rule {name} matched nowhere" + (f": {first.reason}" if first else ""),
                where=(first.source or first.node) if first else "",
                fix="see the near misses in the report, or drop --require",
            )


def write_report(report: PassReport, graph_module: fx.GraphModule, folder: Path) -> None:
    """Write NN-name.txt and NN-name.json."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{report.index:02d}-{report.name}"
    (folder / f"{stem}.txt").write_text(print_graph(graph_module))
    (folder / f"{stem}.json").write_text(json.dumps(report.to_json(), indent=1, sort_keys=True) + "\n")
