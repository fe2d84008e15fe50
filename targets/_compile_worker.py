"""A compiler process: reads pickled sources from standard input, answers on standard output; started by _toolchain.

A process of its own instead of multiprocessing, which would import the user's script again in every worker.
"""

from __future__ import annotations

import os
import pickle
import struct
import sys
from typing import Any, BinaryIO

from mmcompile.core.errors import MMError


def send(stream: BinaryIO, value: Any) -> None:
    """Write one length-prefixed pickle."""
    data = pickle.dumps(value)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def receive(stream: BinaryIO) -> Any:
    """Read one length-prefixed pickle; EOFError if the other side is gone."""
    header = stream.read(8)
    if len(header) < 8:
        raise EOFError
    return pickle.loads(stream.read(struct.unpack("<Q", header)[0]))


def main() -> None:
    """Serve until standard input ends. Whatever a compiler prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    from mmcompile.targets._toolchain import compile_family

    while True:
        try:
            source, architectures, spec = receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            result: Any = compile_family(source, architectures, spec)
        except MMError as error:
            result = error
        send(answers, result)


if __name__ == "__main__":
    main()
