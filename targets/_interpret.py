"""Run emitted kernels on CPU tensors in Triton's interpreter, in a process of its own.

Triton decides once, when it is imported, whether it interprets; so the interpreter lives in a worker process with
TRITON_INTERPRET=1 and exchanges one JSON line and one file of raw tensor storages per run.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmcompile.core.errors import VerificationError
from mmcompile.core.kernel import KernelSource

Argument = Tensor | int


class Interpreter:
    """A worker that interprets kernels; use it as a context manager, or call ``close``.

    Args:
        timeout: seconds that one run may take.
    """

    def __init__(self, timeout: float = 300.0) -> None:
        self._timeout = timeout
        self._folder = tempfile.TemporaryDirectory(prefix="mmcompile-interpret-")
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Interpreter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        source: KernelSource,
        arguments: Sequence[Argument],
        grid: tuple[int, int, int],
        programs: Sequence[tuple[int, int, int]] | None = None,
    ) -> list[Argument]:
        """Launch ``source`` over ``grid`` and return the arguments as they are after the run.

        Args:
            arguments: CPU tensors (views keep their strides, and tensors that share storage still share it) and
                ints, in the order of ``source.parameters``. They are not changed themselves.
            programs: run only these programs of the grid, in this order.

        Raises VerificationError, naming the kernel, if it fails or takes longer than the time-out.
        """
        names = [parameter.name for parameter in source.parameters]
        if len(arguments) != len(names):
            raise VerificationError(
                f"kernel {source.name} takes {len(names)} arguments ({', '.join(names)}), got {len(arguments)}"
            )
        folder = Path(self._folder.name)
        script = folder / f"{source.digest}.py"
        if not script.exists():
            script.write_text(source.text)
        storages, records = describe_arguments(arguments)
        save_file(storages, folder / "in.safetensors")
        job = {"script": str(script), "arguments": records, "grid": list(grid), "programs": programs}
        self._request(source.name, job)
        return rebuild_arguments(load_file(folder / "out.safetensors"), records)

    def close(self) -> None:
        """Stop the worker and delete its files."""
        self._stop()
        self._folder.cleanup()

    def _request(self, name: str, job: dict[str, Any]) -> None:
        worker = self._worker()
        assert worker.stdin is not None and worker.stdout is not None
        worker.stdin.write(json.dumps(job).encode() + b"\n")
        worker.stdin.flush()
        if not select.select([worker.stdout], [], [], self._timeout)[0]:
            self._stop()
            raise VerificationError(f"kernel {name} did not finish within {self._timeout:g} s in the interpreter")
        line = worker.stdout.readline()
        if not line:
            self._stop()
            raise VerificationError(f"the interpreter process ended while it ran kernel {name}")
        error = json.loads(line)["error"]
        if error:
            raise VerificationError(f"kernel {name} failed in the interpreter: {error}")

    def _worker(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            command = [sys.executable, "-m", "mmcompile.targets._interpret_worker", self._folder.name]
            environment = {**os.environ, "TRITON_INTERPRET": "1"}
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
            )
        return self._process

    def _stop(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._process = None


def describe_arguments(arguments: Sequence[Argument]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Storages as bytes, by name, and one JSON record for each argument."""
    storages: dict[str, Tensor] = {}
    names: dict[int, str] = {}
    records: list[dict[str, Any]] = []
    for argument in arguments:
        if not isinstance(argument, Tensor):
            records.append({"value": int(argument)})
            continue
        storage = argument.untyped_storage()
        name = names.setdefault(storage.data_ptr(), f"storage{len(names)}")
        storages[name] = torch.empty(0, dtype=torch.uint8).set_(storage)
        records.append({
            "storage": name, "dtype": str(argument.dtype).removeprefix("torch."), "shape": list(argument.shape),
            "stride": list(argument.stride()), "offset": argument.storage_offset(),
        })
    return storages, records


def rebuild_arguments(storages: dict[str, Tensor], records: list[dict[str, Any]]) -> list[Argument]:
    """The arguments that ``describe_arguments`` recorded, as views of ``storages``."""
    rebuilt: list[Argument] = []
    for record in records:
        if "value" in record:
            rebuilt.append(record["value"])
            continue
        empty = torch.empty(0, dtype=getattr(torch, record["dtype"]))
        storage = storages[record["storage"]].untyped_storage()
        rebuilt.append(empty.set_(storage, record["offset"], record["shape"], record["stride"]))
    return rebuilt
