"""Write an artifact directory: in a temporary place, renamed when complete; equal inputs give equal bytes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

import mmcompile
from mmcompile.capture.export import Captured
from mmcompile.core.errors import ArtifactError, LoweringError
from mmcompile.core.kernel import CompiledKernel, KernelSource
from mmcompile.core.plan import (
    Binary,
    Kernel,
    Manifest,
    ModelSpec,
    Plan,
    QuantizationSpec,
    Record,
    TargetEntry,
    seal,
)
from mmcompile.core.spec import TargetSpec
from mmcompile.core.stream import count_copied
from mmcompile.driver.caches import describe_cache
from mmcompile.driver.compile import Compiled
from mmcompile.driver.counts import write_counts
from mmcompile.driver.options import BuildOptions
from mmcompile.driver.report import write_report
from mmcompile.driver.rewrite import Rewritten
from mmcompile.lower.plan import Lowered

_SHARD_BYTES = 1 << 30
_EXTENSIONS = {"cuda": ("ptx", "cubin"), "hip": ("amdgcn", "hsaco")}


@contextmanager
def claim_output(out: Path, force: bool) -> Iterator[Path]:
    """Give a fresh folder beside ``out`` and rename it to ``out`` at the end; on any failure nothing is left.

    Raises ArtifactError if ``out`` exists (unless it is an artifact and ``force``), or another build is writing it.
    """
    if out.exists() and not (force and (out / "manifest.json").is_file()):
        what = "is an artifact already" if (out / "manifest.json").is_file() else "exists and is no artifact"
        fix = "pass --force to replace it" if "already" in what else "name another directory with -o"
        raise ArtifactError(f"the output {what}", where=str(out), fix=fix)
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = out.parent / f".{out.name}.building"
    _lock(folder, out)
    try:
        yield folder
        (folder / "lock").unlink()
        if out.exists():
            old = out.parent / f".{out.name}.old"
            shutil.rmtree(old, ignore_errors=True)  # left by a build that was killed at this point
            out.rename(old)
            folder.rename(out)
            shutil.rmtree(old)
        else:
            folder.rename(out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _lock(folder: Path, out: Path) -> None:
    """Create the building folder with this process' number in it; take over one whose process is gone."""
    try:
        folder.mkdir()
    except FileExistsError:
        owner = folder / "lock"
        number = owner.read_text() if owner.is_file() else ""
        if number.isdigit() and _is_running(int(number)):
            raise ArtifactError(
                f"another build (process {number}) is writing it", where=str(out), fix="wait for it or name another -o"
            ) from None
        shutil.rmtree(folder)
        folder.mkdir()
    (folder / "lock").write_text(str(os.getpid()))


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class Packer:
    """Collects what belongs into an artifact and writes it."""

    def __init__(
        self, folder: Path, model: str, captured: Captured, rewritten: Rewritten, options: BuildOptions
    ) -> None:
        self.folder, self.model = folder, model
        self.captured, self.rewritten, self.options = captured, rewritten, options
        self.targets: dict[str, TargetEntry] = {}
        self.weights: dict[str, torch.Tensor] = {}
        self.warnings: dict[str, tuple[str, ...]] = {}
        self.plans: dict[str, Plan] = {}
        (folder / "kernels").mkdir()

    def add_target(self, spec: TargetSpec, lowered: Lowered, compiled: Compiled) -> None:
        """Write a target's kernels and plan; remember its weights."""
        kernels = {
            name: self._write_kernel(name, lowered.sources[name], compiled.kernels[name], spec)
            for name in sorted(lowered.sources)
        }
        plan = lowered.plan.model_copy(update={"kernels": kernels})
        file = f"plan.{spec.name}.json"
        write_record(self.folder / file, plan)
        for name, tensor in lowered.weights.items():
            if self.weights.setdefault(name, tensor) is not tensor:
                raise LoweringError(f"two targets want different contents for the weight {name}")
        toolchain = {}
        for kernel in compiled.kernels.values():
            for binary in kernel.values():
                toolchain = {k: str(binary.metadata[k]) for k in ("triton", "ptxas", "fp_fusion")}
        self.targets[spec.name] = TargetEntry(
            plan=file,
            architectures=tuple(a.name for a in spec.architectures),
            toolchain=toolchain,
            copied_bytes=count_copied(plan),
        )
        self.warnings[spec.name] = compiled.warnings
        self.plans[spec.name] = plan

    def _write_kernel(
        self, name: str, source: KernelSource, compiled: dict[str, CompiledKernel], spec: TargetSpec
    ) -> Kernel:
        (self.folder / "kernels" / f"{name}.py").write_text(source.text)
        binaries = {}
        for arch, kernel in compiled.items():
            text_extension, binary_extension = _EXTENSIONS[spec.backend]
            stem = f"kernels/{name}.{arch}"
            (self.folder / f"{stem}.{text_extension}").write_text(kernel.assembly)
            (self.folder / f"{stem}.{binary_extension}").write_bytes(kernel.binary)
            data = kernel.metadata
            binaries[arch] = Binary(
                file=f"{stem}.{binary_extension}",
                assembly=f"{stem}.{text_extension}",
                sha256=hashlib.sha256(kernel.binary).hexdigest(),
                symbol=data["name"],
                **{k: int(data.get(k) or 0) for k in (
                    "shared", "num_warps", "warp_size", "registers", "spills", "global_scratch_size",
                    "global_scratch_align", "profile_scratch_size",
                )},
                ledger=data["ledger"],
            )  # fmt: skip
        return Kernel(
            name=name,
            source=f"kernels/{name}.py",
            parameters=tuple((p.name, p.type) for p in source.parameters),
            num_stages=source.num_stages,
            expectations=source.ledger,
            binaries=binaries,
            proofs=("assembled", "ledger"),
            lanes=source.lanes,
        )

    def finish(self) -> Manifest:
        """Write weights, tokenizer, report and manifest."""
        self._write_weights()
        if self.captured.tokenizer is not None:
            (self.folder / "tokenizer.json").write_bytes(self.captured.tokenizer)
        manifest = self._make_manifest()
        write_counts(self.folder, self.rewritten.counts)
        write_report(self.folder, manifest, self.plans)
        record = seal(manifest.model_dump(mode="json") | {"files": hash_files(self.folder)})
        manifest = Manifest.model_validate(record)
        write_record(self.folder / "manifest.json", manifest)
        return manifest

    def _has_weights(self) -> bool:
        return not any(t.is_meta for t in self.weights.values())

    def _write_weights(self) -> None:
        """Shards of about a gigabyte, tensors in name order.

        What was captured without values is left out; tables of angles are no parameters and are there in any case.
        """
        kept = sorted(name for name, tensor in self.weights.items() if not tensor.is_meta)
        if not kept:
            return
        folder = self.folder / "weights"
        folder.mkdir()
        shard: dict[str, torch.Tensor] = {}
        size, number = 0, 0
        for name in kept:
            tensor = self.weights[name].detach().contiguous()
            if shard and size + tensor.nbytes > _SHARD_BYTES:
                save_file(shard, folder / f"weights-{number:05d}.safetensors")
                shard, size, number = {}, 0, number + 1
            shard[name] = tensor
            size += tensor.nbytes
        save_file(shard, folder / f"weights-{number:05d}.safetensors")

    def _make_manifest(self) -> Manifest:
        config, context = self.captured.config, self.rewritten.context
        decoder = self.captured.kind == "decoder"
        return Manifest(
            digest="",
            mmcompile=mmcompile.__version__,
            kind="decoder" if decoder else "module",
            model=ModelSpec(
                name=self.model if "/" not in self.model else Path(self.model).name,
                door=self.captured.source,
                dtype=self.options.dtype,
                vocab_size=int(context.info.get("vocab_size", 0)),
                max_context=context.max_context if decoder else 0,
                eos_token_ids=tuple(config.get("eos_token_ids", ())),
                bos_token_id=config.get("bos_token_id"),
                tokenizer="tokenizer.json" if self.captured.tokenizer is not None else None,
                chat_template=self.captured.chat_template,
                parameters=self.rewritten.parameters,
                checkpoint=str(config.get("checkpoint", "")),
            ),
            quantization=QuantizationSpec(
                scheme=self.options.quantization,
                options=self.options.quantization_options,
                layers=context.info.get("layers", {}),
            ),
            cache=describe_cache(self.plans) if decoder else None,
            targets=self.targets,
            weights="packed" if self._has_weights() else "none",
            files={},
        )


def write_record(path: Path, record: Record) -> None:
    """JSON with sorted keys, one trailing newline."""
    path.write_text(json.dumps(record.model_dump(mode="json"), indent=1, sort_keys=True) + "\n")


def hash_files(folder: Path) -> dict[str, str]:
    """sha256 of every file below ``folder`` but the manifest and the lock, by relative path."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in ("manifest.json", "lock"))
    hashes = {}
    for path in files:
        with path.open("rb") as stream:
            hashes[path.relative_to(folder).as_posix()] = hashlib.file_digest(stream, "sha256").hexdigest()
    return hashes
