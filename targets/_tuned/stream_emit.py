"""Write the kernel of a decode step in one launch."""

from __future__ import annotations

from mmcompile.core.errors import LoweringError
from mmcompile.core.kernel import KernelSource, Parameter
from mmcompile.core.spec import Architecture
from mmcompile.core.stream import WARPS
from mmcompile.targets._tuned import stream_attention as attention
from mmcompile.targets._tuned import stream_products as products
from mmcompile.targets._tuned import stream_ptx as ptx
from mmcompile.targets._tuned.stream_body import write_body
from mmcompile.targets._tuned.stream_driver import BF16, HELPERS
from mmcompile.targets._tuned.stream_plan import StepPlan
from mmcompile.targets._tuned.stream_refuse import refuse_stream
from mmcompile.targets._tuned.stream_shape import PRIVATE_OFFSET, StepShape


def list_parameters(shape: StepShape) -> tuple[Parameter, ...]:
    """The launch's arguments: ``value`` names what each is (see ``emit_stream``)."""
    start = "embedding" if shape.first == 0 else "residual"
    names = [("stream", "*u8"), ("norms", "*bf16"), (start, "*bf16"), ("table", "*bf16"), ("input_ids", "*i32"),
             ("positions", "*i32"), ("slot_mapping", "*i64"), ("block_table", "*i32"), ("seq_lens", "*i32"),
             ("workspace", "*i32"), ("result", "*bf16")]  # fmt: skip
    if StepPlan(shape).packed:
        names.append(("gains", "*fp32"))
    parameters = [Parameter(name, kind, name) for name, kind in names]
    parameters += [Parameter(f"cache_{i}", "*bf16", f"kv_cache.{i}") for i in range(shape.first, shape.end)]
    return (*parameters, Parameter("tokens", "i32", "tokens"), Parameter("max_blocks", "i32", "max_blocks"))


def list_assembly(shape: StepShape) -> dict[str, ptx.Assembly]:
    """Name of the constant to (text, constraints)."""
    plan = StepPlan(shape)
    tokens, parts = plan.merged_tokens, plan.merged_parts
    if plan.packed:
        multiply, keep = products.multiply_unit(), products.store_unit_sums(shape)
    elif plan.folded:
        multiply, keep = products.multiply_folded(shape), products.store_folded_sums(shape)
    else:
        multiply, keep = ptx.multiply_stage(shape), ptx.store_sums(shape)
    return {
        "BASE": ptx.base_address(), "SET_UP": ptx.set_up(shape), "REFILL": ptx.refill(), "WAIT": ptx.wait_copy(shape),
        "PREFETCH": ptx.prefetch(shape),
        "MULTIPLY": multiply, "KEEP": keep,
        "ADD_WARPS": ptx.add_warps(pair=False), "ADD_PAIRS": ptx.add_warps(pair=True),
        "ADD_SQUARES": ptx.add_squares(), "STAMP": ptx.stamp(), "POST_WORD": ptx.post_word(),
        "POST_PAIR": ptx.post_pair(),
        "POLL_RESIDUAL": ptx.poll_residual(shape, plan.load_chunks["qkv"]),
        "STORE_SQUARES": ptx.store_squares(shape), "LOAD_WEIGHTS": ptx.load_weights(shape, plan.load_chunks["qkv"]),
        "POLL_ACTIVATION": ptx.poll_activations(shape, shape.intermediate, plan.load_chunks["down"]),
        "POLL_HEADS": ptx.poll_heads(shape), "ATTEND": attention.attend_stage(shape),
        "STORE_PART": attention.store_part(shape), "MERGE_WARPS": attention.merge_warps(shape),
        "MERGE_PARTS": attention.merge_parts(shape, tokens, parts),
        "FINISH_PARTS": attention.finish_parts(shape, tokens),
    }  # fmt: skip


def list_constants(shape: StepShape) -> dict[str, int | float]:
    """Module constants of the emitted text."""
    plan = StepPlan(shape)
    mails = {f"MAIL_{name.upper()}": place for name, place in plan.workspace.items()}
    shared = plan.shared
    return {
        "MAX_TOKENS": shape.max_tokens, "PROGRAMS": shape.programs, "WARPS": WARPS, "TEAM": shape.team,
        "FIRST": shape.first, "END": shape.end, "HIDDEN": shape.hidden, "HEADS": shape.heads,
        "KV_HEADS": shape.kv_heads, "HEAD_DIM": shape.head_dim, "GROUP": shape.group, "PAGE": shape.page_size,
        "EPS": shape.eps, "UNIT": plan.unit_tokens, "UNIT_BYTES": plan.unit_bytes, "TILE_ROWS": plan.tile_rows,
        "SLOT": plan.slot_bytes,
        "SLOTS": plan.slots, "QKV_STAGES": plan.stages_of["qkv"], "LAYER_STAGES": plan.layer_stages,
        "HEAD_STAGES": plan.head_stages, "UNITS": plan.units, "BARRIERS": shared["barriers"],
        "SQUARES": shared["squares"], "POINTERS": shared["pointers"] - 8 * shape.first, "HEADS_PLACE": shared["qkv"],
        "ZEROS": shared["zeros"], "X": shared["x"], "X_STRIDE": plan.x_stride, "X_CHUNKS": plan.x_chunks,
        "SCRATCH": shared["scratch"], "SCRATCH_BYTES": plan.scratch_bytes, "RING": shared["ring"],
        "DEAD": shared["dead"], "STEADY": plan.prefetch[0], **mails, "Q_STRIDE": plan.q_stride,
    }  # fmt: skip


def emit_stream(shape: StepShape, architecture: Architecture) -> KernelSource:
    """The kernel of a step.

    Parameters: stream (``pack_stream``), norms (``pack_norms``), embedding [vocabulary, hidden] or residual [tokens,
    hidden] bf16, table of RoPE [positions, head_dim] bf16 = [cos | sin], input_ids, positions, seq_lens int32 [tokens],
    slot_mapping int64 [tokens], block_table int32 [tokens, max_blocks], workspace int32 (``StepPlan.workspace``; zeros
    before the first launch, after a fault and every ``StepPlan.period`` launches), result bf16 [tokens, vocabulary or
    hidden], gains for nvfp4 (``pack_gains``), the layers' caches.

    One token for each sequence, its position seq_lens - 1; rows from ``tokens`` on are computed as empty ones and not
    written. The launch needs ``StepPlan.shared_bytes`` of dynamic shared memory, all programs resident, and no other
    launch of the same workspace at the same time. Raises LoweringError if ``refuse_stream`` refuses.
    """
    reason = refuse_stream(shape, architecture)
    if reason is not None:
        raise LoweringError(f"no streamed step for this shape: {reason}", fix="use the standalone kernels")
    parameters = list_parameters(shape)
    s = shape
    heads = f"{s.heads}x{s.kv_heads}x{s.head_dim}"
    name = f"stream_step_{s.weight_format}_{s.hidden}_{heads}_{s.first}to{s.end}_tokens{s.max_tokens}"
    lines = ['"""One decode step in one launch. Emitted by mmcompile; needs only Triton."""', "import triton"]
    lines += ["import triton.language as tl", ""]
    lines += [f"{key} = tl.constexpr({value!r})" for key, value in list_constants(shape).items()]
    for key, (text, constraints) in list_assembly(shape).items():
        lines += [f'{key} = tl.constexpr("""{text}""")', f"{key}_C = tl.constexpr({constraints!r})"]
    plan = StepPlan(shape)
    helpers = products.write_helpers(shape) if plan.packed or plan.folded else BF16
    signature = ", ".join(p.name for p in parameters)
    entry = f"@triton.jit\ndef {name}({signature}):\n{write_body(shape)}\n\n\nkernel = {name}\n"
    text = "\n".join(lines) + "\n\n" + HELPERS + helpers + "\n\n" + entry
    ledger = {"HMMA": True, "UBLKCP": True, "SYNCS": True}
    return KernelSource(
        name,
        text,
        parameters,
        (str(shape.programs), "1", "1"),
        WARPS,
        1,
        ledger,
        lanes=True,
        max_registers=255,
        private_shared=(PRIVATE_OFFSET, StepPlan(s).shared_bytes),
    )
