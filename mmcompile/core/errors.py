"""Every error a user can meet: one clear sentence (what, where, what to do) and a stable exit code."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable


class MMError(Exception):
    """Base of all user-facing errors.

    Args:
        what: what is wrong, a clause without a final full stop.
        where: file, node or source line; empty if there is no place to name.
        fix: what the user should do, an imperative clause.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = what, where, fix
        place = f" (at {where})" if where else ""
        advice = f"; {fix}" if fix else ""
        super().__init__(f"{what}{place}{advice}.")

    def __reduce__(self) -> tuple[functools.partial[MMError], tuple[()]]:
        """Pickle by arguments, so that an error crosses from a worker process with its fields."""
        return functools.partial(type(self), self.what, where=self.where, fix=self.fix), ()


class UsageError(MMError):
    """An unknown name or a wrong option."""

    exit_code = 2


class CaptureError(MMError):
    """A model that cannot be exported to a graph."""

    exit_code = 3


class LoweringError(MMError):
    """An operation without a kernel, a required fusion that did not match, a limit exceeded."""

    exit_code = 4


class CheckpointError(MMError):
    """A malformed checkpoint: missing, extra, wrongly shaped, NaN or truncated tensors, wrong scale convention."""

    exit_code = 5


class ArtifactError(MMError):
    """An artifact that is damaged, of another schema, or built for another target."""

    exit_code = 6


class RequestError(MMError):
    """A request the engine cannot serve: prompt longer than the context, out of pages."""

    exit_code = 7


class VerificationError(MMError):
    """A pass or a kernel that does not agree with its reference."""

    exit_code = 8


class ToolchainError(MMError):
    """A compiler, assembler, driver or package that is missing or failed."""

    exit_code = 9


def unknown_name(kind: str, name: str, known: Iterable[str], *, where: str = "") -> UsageError:
    """Build the error for a name that is in no registry, with the closest known name."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    fix = f"did you mean {close[0]!r}" if close else f"known: {', '.join(names) or 'none'}"
    return UsageError(f"unknown {kind} {name!r}", where=where, fix=fix)
