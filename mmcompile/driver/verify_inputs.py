"""Cases and seeded operands for verifying kernels: sequences, paged caches, weights, by what an input means."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mmcompile.core.formats import mxfp8, nvfp4
from mmcompile.core.formats.cache_pages import PLAIN
from mmcompile.core.ops.define import get_op
from mmcompile.core.plan import Launch, Plan
from mmcompile.driver.verify_caches import fill_pages, find_layout

TOKEN_COUNTS = (1, 3, 16, 17, 33)
FEW_ROWS = (1, 7)
"""Token counts for operations with many or long programs a row; 7 rows hold every kind of sequence and sampling."""
GARBAGE_PAGES = (-1, 1 << 30)
EMPTY_SLOT = -1

_POSITIVE_STEPS = {"log", "log2", "sqrt", "rsqrt", "reciprocal", "div", "pow"}
_COSTLY_ROWS = {"mm.embedding", "mm.sample"}
_COSTLY_STEPS = {"mm.paged_attention"}
_NORM_OPS = {"rms_norm", "add_rms_norm"}
_CACHES = ("kv_cache", "index_cache")


@dataclass(frozen=True)
class Case:
    """Values of the symbols; for a decoder also the sequences: lengths with the new tokens, and numbers of new tokens.

    A sequence of length 0 is padding: in decode it still has its one row.
    """

    symbols: dict[str, int]
    lengths: tuple[int, ...] = ()
    new: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The symbol values, e.g. "batch=3, tokens=17"."""
        shown = ("batch", "tokens") if self.new else sorted(self.symbols)
        return ", ".join(f"{name}={self.symbols[name]}" for name in shown)


def list_token_counts(above: int, upper: int, quick: bool, usual: tuple[int, ...] = TOKEN_COUNTS) -> list[int]:
    """Token counts in (above, upper] that cover tails and full tiles; one of them if ``quick``; none if it is empty."""
    counts = [t for t in usual if above < t <= upper]
    if not counts:
        counts = [t for t in (above + 1, above + 17) if t <= upper]
    return counts[len(counts) // 2 : len(counts) // 2 + 1] if quick else counts


def list_decoder_cases(
    plan: Plan, phase: str, op: str, above: int, max_tokens: int | None, quick: bool
) -> list[Case]:
    """Cases of a choice of ``op`` that serves token counts in (above, max_tokens] in "prefill" or "decode"."""
    limits = plan.symbols
    largest = limits["batch"] if phase == "decode" else limits["tokens"]
    page, context = _page_size(plan), _longest_sequence(plan)
    costly = op in _COSTLY_ROWS or (phase == "decode" and op in _COSTLY_STEPS)
    usual = FEW_ROWS if costly else TOKEN_COUNTS
    cases = []
    for tokens in list_token_counts(above, min(max_tokens or largest, largest), quick, usual):
        if phase == "decode":
            lengths, new = _decode_lengths(tokens, page, context), (1,) * tokens
        else:
            lengths, new = _prefill_lengths(tokens, page, context, limits["batch"])
        blocks = max(1, *(-(-length // page) for length in lengths))
        symbols = {
            "tokens": tokens,
            "batch": len(lengths),
            "max_blocks": min(blocks + 1, limits["max_blocks"]),
            "pages": sum(-(-length // page) for length in lengths) + 2,
        }
        cases.append(Case(symbols, lengths, new))
    return cases


def list_module_cases(plan: Plan, above: int, max_tokens: int | None, quick: bool) -> list[Case]:
    """Cases of a module: every symbol at a small odd value, then at a larger one."""
    cases = []
    for value in (17,) if quick else (3, 17):
        symbols = {name: min(value, limit) for name, limit in plan.symbols.items()}
        if "tokens" in symbols:
            upper = min(max_tokens or plan.symbols["tokens"], plan.symbols["tokens"])
            symbols["tokens"] = min(max(value, above + 1), upper)
        if symbols not in [case.symbols for case in cases]:
            cases.append(Case(symbols))
    return cases


def _page_size(plan: Plan) -> int:
    return next(int(b.shape[-2]) for b in plan.buffers.values() if b.role == "state")


def _longest_sequence(plan: Plan) -> int:
    """Tokens of the longest sequence: what the block table holds, at most the positions of the RoPE tables."""
    tables = [
        int(view.shape[0])
        for phase in plan.phases.values()
        for launch in phase.launches
        if (view := launch.inputs.get("cos_sin")) is not None
    ]
    return min([plan.symbols["max_blocks"] * _page_size(plan), *tables])


def _decode_lengths(batch: int, page: int, context: int) -> tuple[int, ...]:
    """Partial, full and single-token pages, and a padded row, in turn."""
    pattern = (page + 3, 1, page, 0, 5, 2 * page, page - 1, page + 1, 2)
    return tuple(min(pattern[i % len(pattern)], context) for i in range(batch))


def _prefill_lengths(tokens: int, page: int, context: int, batch: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(lengths, new tokens): a fresh prompt, a chunk behind more than a page of history, one token, a padded row."""
    shares = (tokens,) if batch < 3 or tokens < 3 else (tokens // 2, tokens - tokens // 2 - 1, 1)
    new = [min(n, context) for n in shares if n]
    history = (0, page + 2, 2 * page - 1)
    lengths = [min(n + history[i % len(history)], context) for i, n in enumerate(new)]
    if batch > len(new) and tokens > 3:
        lengths, new = [*lengths, 0], [*new, 0]
    return tuple(lengths), tuple(new)


def describe_sequences(case: Case, page: int, generator: torch.Generator) -> dict[str, Tensor]:
    """The runtime inputs of a case, int64: positions, slot_mapping, block_table, seq_lens, query_start, history_slots.

    Pages are in shuffled order, entries of the block table behind a sequence are garbage, one real token of a larger
    batch has an empty slot. ``history_slots`` are the slots of the tokens that are in the cache already; with the new
    ones they are ``all_slots``.
    """
    blocks = [-(-length // page) for length in case.lengths]
    order = torch.randperm(case.symbols["pages"], generator=generator)
    table = torch.tensor(GARBAGE_PAGES).repeat(len(blocks), case.symbols["max_blocks"])[:, : case.symbols["max_blocks"]]
    positions, slots, history, taken = [], [], [], 0
    for b, (length, new) in enumerate(zip(case.lengths, case.new, strict=True)):
        table[b, : blocks[b]] = order[taken : taken + blocks[b]]
        taken += blocks[b]
        place = torch.arange(length)
        own = table[b, place // page] * page + place % page
        start = length - min(new, length)
        positions.append(place[start:] if length else torch.zeros(new, dtype=torch.int64))
        slots.append(own[start:] if length else torch.full((new,), EMPTY_SLOT))
        history.append(own[:start])
    slot_mapping, history_slots = torch.cat(slots), torch.cat(history)
    all_slots = torch.cat([history_slots, slot_mapping[slot_mapping >= 0]])
    if len(slot_mapping) > 3:
        slot_mapping[2] = EMPTY_SLOT
    return {
        "positions": torch.cat(positions),
        "slot_mapping": slot_mapping,
        "block_table": table,
        "seq_lens": torch.tensor(case.lengths),
        "query_start": torch.tensor([0, *case.new]).cumsum(0),
        "history_slots": history_slots,
        "all_slots": all_slots,
    }


def fill_operands(launch: Launch, views: Mapping[str, Tensor], case: Case, seed: int) -> None:
    """Write seeded values into the tensors ``views`` (by input name) of a launch; unused cache rows stay."""
    generator = torch.Generator().manual_seed(seed)
    op = launch.op.removeprefix("mm.")
    known: dict[str, Tensor] = {}
    caches = [name for name in _CACHES if name in views]
    if caches:
        known = describe_sequences(case, views[caches[0]].shape[-2], generator)
        for name in caches:
            slots = known["history_slots" if name in get_op(op).mutates else "all_slots"]
            layout = find_layout(launch, name)
            if layout == PLAIN:
                _fill_cache(views[name], slots, generator)
            else:
                fill_pages(views[name], layout, slots, generator)
    elif case.new:
        known["query_start"] = torch.tensor([0, *case.new]).cumsum(0)
    if "packed" in views:
        known |= _make_nvfp4(views["packed"].shape, generator)
    if "values" in views:
        known |= _make_mxfp8(views["values"].shape, generator)
    if "experts" in views:
        known |= _make_experts(views, generator)
    if "x_packed" in views:
        known |= _make_nvfp4_activations(views["x_packed"].shape, generator)
    if op == "sample":
        known |= _make_sampling(len(views["logits"]), views["logits"].shape[1], generator)
    for name, view in views.items():
        if name in caches:
            continue
        target = _without_repeats(view)
        values = known[name] if name in known else _make_values(launch, name, target, views, generator)
        target.copy_(values.to(view.dtype))


def _without_repeats(view: Tensor) -> Tensor:
    """The elements of a view that are stored once: expanded dimensions narrowed to one."""
    for dimension, stride in enumerate(view.stride()):
        if stride == 0 and view.shape[dimension] > 1:
            view = view.narrow(dimension, 0, 1)
    return view


def _fill_cache(cache: Tensor, slots: Tensor, generator: torch.Generator) -> None:
    """``cache``: [pages, heads, page_size, n], or [pages, page_size, n] of index keys."""
    cache = cache.unsqueeze(1) if cache.dim() == 3 else cache
    page, size = cache.shape[2], (len(slots), cache.shape[1], cache.shape[3])
    cache[slots // page, :, slots % page] = torch.randn(size, generator=generator).to(cache.dtype)


def _make_nvfp4(shape: torch.Size, generator: torch.Generator) -> dict[str, Tensor]:
    """A random weight encoded; every row gets a global scale of its own, as merged layers have."""
    weight = torch.randn(shape[0], 2 * shape[1], generator=generator) / math.sqrt(2 * shape[1])
    packed, scale, multiplier = nvfp4.encode(weight)
    factors = 0.5 + torch.rand(shape[0], generator=generator)
    return {"packed": packed, "scale": scale, "global_scale": multiplier * factors}


def _make_mxfp8(shape: torch.Size, generator: torch.Generator) -> dict[str, Tensor]:
    """A random weight encoded."""
    parts = mxfp8.encode(torch.randn(shape, generator=generator) / math.sqrt(shape[1]))
    return dict(zip(("values", "scale"), parts, strict=True))


def _make_experts(views: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Choices of experts and their weights, and the stacks, encoded where they are packed.

    The first expert is popular, the last has no token where there is a choice; the second token has an empty place, the
    third is padding.
    """
    stacks = {base: views.get(base, views.get(f"{base}_packed")) for base in ("gate_up", "down")}
    known: dict[str, Tensor] = {}
    for base, stack in stacks.items():
        assert stack is not None, f"experts without {base}"
        if base in views:
            known[base] = torch.randn(stack.shape, generator=generator) / math.sqrt(stack.shape[2])
            continue
        parts = [_make_nvfp4(matrix.shape, generator) for matrix in stack]
        known |= {f"{base}_{name}": torch.stack([part[name] for part in parts]) for name in parts[0]}
    tokens, top_k = views["experts"].shape
    count = len(known[next(iter(known))])
    ranking = torch.rand(tokens, count, generator=generator)
    ranking[:, 0] += 0.8
    ranking[:, -1] -= 2.0
    experts = ranking.argsort(dim=1, descending=True)[:, :top_k].clone()
    experts[1:2, -1] = -1
    experts[2:3] = -1
    return known | {"experts": experts, "weights": torch.rand(tokens, top_k, generator=generator)}


def _make_nvfp4_activations(shape: torch.Size, generator: torch.Generator) -> dict[str, Tensor]:
    """Random activations encoded, every token on its own."""
    parts = nvfp4.encode_rows(torch.randn(shape[0], 2 * shape[1], generator=generator))
    return dict(zip(("x_packed", "x_scale", "x_global_scale"), parts, strict=True))


def _make_sampling(batch: int, vocabulary: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Greedy and sampled rows with every combination of top-k and top-p, and peaked logits."""
    row = torch.arange(batch)
    return {
        "logits": torch.randn(batch, vocabulary, generator=generator) * 3,
        "temperature": torch.where(row % 5 == 0, 0.0, 0.5 + 0.25 * (row % 4)),
        "top_k": torch.where(row % 2 == 0, 0, 1 + 7 * row).clamp(max=vocabulary),
        "top_p": torch.where(row % 4 < 2, 1.0, 0.9),
        "seed": torch.randint(-(1 << 62), 1 << 62, (batch,), generator=generator),
        "positions": torch.randint(0, 1000, (batch,), generator=generator),
    }


def _make_values(
    launch: Launch, name: str, target: Tensor, views: Mapping[str, Tensor], generator: torch.Generator
) -> Tensor:
    """Values of an input that stands for itself: ids, tables, weights, activations."""
    shape = tuple(target.shape)

    def normal(scale: float) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    makers: dict[str, Callable[[], Tensor]] = {
        "ids": lambda: torch.randint(0, views["weight"].shape[0], shape, generator=generator),
        "positions": lambda: torch.randint(0, _count_positions(launch, views), shape, generator=generator),
        "blocks": lambda: _make_selection(shape, views["block_table"].shape[1], generator),
        "cos_sin": lambda: _make_rope_table(shape, generator),
        "q_weight": lambda: 1 + normal(0.2),
        "k_weight": lambda: 1 + normal(0.2),
        "index_q_weight": lambda: 1 + normal(0.2),
        "index_k_weight": lambda: 1 + normal(0.2),
    }
    if launch.op.startswith("mm.") and name in makers:
        return makers[name]()
    if launch.op.startswith("mm.") and name == "weight":
        is_norm = launch.op.removeprefix("mm.") in _NORM_OPS
        return 1 + normal(0.2) if is_norm else normal(1.0 if "ids" in views else shape[-1] ** -0.5)
    if target.dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator)
    if not target.dtype.is_floating_point:
        return torch.randint(0, 8, shape, generator=generator)
    steps = {step[1] for step in launch.attributes.get("program", ())}
    return 0.5 + 1.5 * torch.rand(shape, generator=generator) if steps & _POSITIVE_STEPS else normal(1.0)


def _make_selection(shape: tuple[int, ...], blocks: int, generator: torch.Generator) -> Tensor:
    """Block ids [tokens, selections, n] as ``block_top_k`` gives them: different ones ascending, then -1."""
    n = shape[-1]
    chosen = torch.rand(*shape[:-1], max(blocks, n), generator=generator).argsort(-1)[..., :n]
    unused = (chosen >= blocks) | (torch.rand(shape, generator=generator) < 0.2)
    ids = torch.where(unused, blocks, chosen).sort(-1).values
    return torch.where(ids == blocks, -1, ids)


def _count_positions(launch: Launch, views: Mapping[str, Tensor]) -> int:
    """Positions that the RoPE table has, or the blocks of a selection."""
    if "cos_sin" in views:
        return views["cos_sin"].shape[0]
    return views["scores"].shape[-1] * int(launch.attributes["block_size"])


def _make_rope_table(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Rows [cos | sin] of random angles."""
    angles = torch.rand(shape[0], shape[1] // 2, generator=generator) * 2 * math.pi
    return torch.cat([angles.cos(), angles.sin()], dim=-1)
