"""The registers of a basic block in generated code: lists of arrays, or Python variables where that is enough.

Within a block the emitter remembers in which variable a register's value is, and as which type, so that it is viewed
or decoded once. Registers that occur in one block only (see ``registers``) are variables; the others are elements of
the list ``R``, which the rest of the emulator sees.
"""

from __future__ import annotations

from collections.abc import Callable

from mmcompile.emulate.ptx.data_types import WIDTH, pack, storage, unpack

_EXACT_VIEWS = ("s8", "s16", "s32", "s64", "f32", "f64", "f32x2")
"""Types whose values are views of their storage, of the same number of bytes."""


class RegisterFile:
    """Expressions of register values while a block is translated.

    ``by_index``: registers that change behind the block's back; they are always read from the list.
    """

    def __init__(
        self,
        append: Callable[[str], None],
        new_name: Callable[[], str],
        local: frozenset[int],
        by_index: frozenset[int],
    ) -> None:
        self._append, self._new_name, self._local, self._by_index = append, new_name, local, by_index
        self._values: dict[int, dict[str, str]] = {}

    def read(self, register: int, width: int, data_type: str) -> str:
        """The value as a PTX type: an expression, in most cases a variable. ``width``: of the register in bytes."""
        values = self._values.setdefault(register, {})
        if data_type in values:
            return values[data_type]
        raw = self.read_raw(register)
        expression = raw
        if width not in (0, WIDTH[data_type]):
            expression = f"{raw}.astype({storage(data_type)})"
        expression = unpack(expression, data_type)
        if expression == raw or register in self._by_index:
            return expression
        values[data_type] = self._assign(expression)
        return values[data_type]

    def read_raw(self, register: int) -> str:
        """The storage: an array of unsigned integers, or of bools for a predicate."""
        values = self._values.get(register, {})
        if "raw" not in values:
            if register not in self._local:
                return f"R[{register}]"
            (data_type, name), *_ = values.items()
            values["raw"] = self._assign(pack(name, data_type))
        return values["raw"]

    def write(self, register: int, expression: str, data_type: str, mask: str | None, predicated: bool) -> None:
        """Assign a storage expression, or (for a type among the exact views) the value itself."""
        local = register in self._local
        is_value = data_type in _EXACT_VIEWS
        if mask and (predicated or not local):
            before = self.read_raw(register) if not local or self._values.get(register) else None
            expression = pack(expression, data_type) if is_value else expression
            expression = f"where({mask}, {expression}, {before})" if before else expression
            is_value = False
        if register in self._by_index:
            self._append(f"R[{register}] = {pack(expression, data_type) if is_value else expression}")
            return
        name = self._assign(expression)
        self._values[register] = {data_type if is_value else "raw": name}
        if not local:
            raw = pack(name, data_type) if is_value else name
            self._append(f"R[{register}] = {raw}")
            if is_value:
                self._values[register]["raw"] = f"R[{register}]"

    def _assign(self, expression: str) -> str:
        if expression.isidentifier():
            return expression
        name = self._new_name()
        self._append(f"{name} = {expression}")
        return name


def is_exact_view(data_type: str) -> bool:
    """Whether ``RegisterFile.write`` takes the value of this type itself."""
    return data_type in _EXACT_VIEWS
