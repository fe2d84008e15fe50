"""Assembly text to instructions: mnemonics, operands, modifiers, labels, and the kernel descriptor (.amdhsa_*)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from mmcompile.emulate.faults import EmulationFault

_LABEL = re.compile(r"^([.\w$]+):$")
_DESCRIPTOR = re.compile(r"^\.amdhsa_(\w+)\s+(-?\w+)")
_MODIFIER = re.compile(r"^(\w+)(?::(\[[^\]]*\]|\S+))?$")


@dataclass(frozen=True)
class Instruction:
    """One line: ``op`` is the mnemonic, ``operands`` the texts between commas, ``modifiers`` what follows them."""

    op: str
    operands: tuple[str, ...]
    modifiers: dict[str, str]
    line: int
    text: str

    def list_modifier(self, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """A modifier such as ``op_sel:[0,1]`` as integers; missing entries come from ``default``."""
        given = self.modifiers.get(name)
        if given is None:
            return default
        values = tuple(int(item, 0) for item in given.strip("[]").split(","))
        return values + default[len(values) :]

    @property
    def form(self) -> str:
        """Mnemonic with the names of its modifiers: what the tables know or do not know."""
        return " ".join([self.op, *sorted(self.modifiers)])


@dataclass(frozen=True)
class KernelArgument:
    """A kernel parameter: where it lies in the kernel argument segment (bytes) and its ``value_kind``."""

    offset: int
    size: int
    kind: str


@dataclass
class Kernel:
    """A kernel and the functions that it may call.

    Attributes:
        instructions: the kernel's own first. labels: name to index of an instruction. start: index where the
            hardware starts; behind the prologue that loads the preloaded arguments on old firmware.
        descriptor: the .amdhsa_ directives. arguments: from the metadata, in order.
    """

    name: str
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    start: int = 0
    descriptor: dict[str, int] = field(default_factory=dict)
    arguments: list[KernelArgument] = field(default_factory=list)

    def describe(self, name: str, default: int = 0) -> int:
        """A value of the kernel descriptor."""
        return self.descriptor.get(name, default)


def split_operands(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    parts, depth, current = [], 0, ""
    for character in text:
        depth += (character in "[(") - (character in "])")
        if character == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += character
    return [*parts, current.strip()] if current.strip() else parts


def parse_instruction(text: str, line: int) -> Instruction:
    """``v_add_f32_dpp v4, v4, v4 row_shr:8 bound_ctrl:1``: the last operand is followed by modifiers."""
    op, _, rest = text.partition(" ")
    if op in ("s_waitcnt", "s_sendmsg", "s_getreg_b32", "s_setreg_b32", "s_setreg_imm32_b32"):
        return Instruction(op, (rest.strip(),), {}, line, text)
    parts = split_operands(rest)
    modifiers: dict[str, str] = {}
    if parts:
        words = re.findall(r"[^\s\[]*\[[^\]]*\]\S*|\S+", parts[-1])
        parts[-1] = words[0]
        for word in words[1:]:
            match = _MODIFIER.match(word)
            if not match:
                raise EmulationFault("malformed assembly", f"cannot read the modifier {word!r}", line, text)
            modifiers[match[1]] = match[2] or "1"
    return Instruction(op, tuple(parts), modifiers, line, text)


def _list_functions(lines: list[str]) -> dict[str, tuple[int, int]]:
    """Name to the first and last line of every function's body."""
    functions, open_name, start = {}, "", 0
    names = {m[1] for line in lines if (m := re.match(r"^\.type\s+([\w.$]+),@function", line))}
    for number, line in enumerate(lines):
        label = _LABEL.match(line)
        if label and label[1] in names:
            open_name, start = label[1], number
        elif open_name and line.startswith(".size"):
            functions[open_name] = (start, number)
            open_name = ""
    return functions


def parse_kernel(assembly: str, entry: str) -> Kernel:
    """The kernel ``entry`` of a text, and every function of it that is no kernel. Raises EmulationFault."""
    lines = [line.split(";")[0].split("//")[0].strip() for line in assembly.split("\n")]
    functions = _list_functions(lines)
    if entry not in functions:
        known = ", ".join(sorted(functions)) or "none"
        raise EmulationFault("malformed assembly", f"no function {entry!r} in the text; it has {known}")
    kernel = Kernel(entry)
    kernels = {m[1] for line in lines if (m := re.match(r"^\.amdhsa_kernel\s+([\w.$]+)", line))}
    _parse_descriptor(kernel, lines)
    others = [name for name in functions if name != entry and name not in kernels]
    for name in [entry, *others]:
        _parse_body(kernel, lines, *functions[name])
    kernel.arguments = _parse_arguments(assembly, entry)
    return kernel


def _parse_body(kernel: Kernel, lines: list[str], first: int, last: int) -> None:
    preload = kernel.describe("user_sgpr_kernarg_preload_length") > 0
    for number in range(first, last):
        line = lines[number]
        label = _LABEL.match(line)
        if label:
            kernel.labels[label[1]] = len(kernel.instructions)
        elif line.startswith(".p2align") and preload and kernel.instructions and not kernel.start:
            kernel.start = len(kernel.instructions)
        elif line and not line.startswith("."):
            kernel.instructions.append(parse_instruction(re.sub(r"\s+", " ", line), number + 1))


def _parse_descriptor(kernel: Kernel, lines: list[str]) -> None:
    inside = False
    for line in lines:
        if line.startswith(".amdhsa_kernel"):
            inside = line.split()[1] == kernel.name
        elif line.startswith(".end_amdhsa_kernel"):
            inside = False
        elif inside and (match := _DESCRIPTOR.match(line)):
            try:
                kernel.descriptor[match[1]] = int(match[2], 0)
            except ValueError:
                continue


def _parse_arguments(assembly: str, entry: str) -> list[KernelArgument]:
    """The ``.args`` of the kernel's metadata (YAML as LLVM prints it)."""
    metadata = assembly.partition(".amdgpu_metadata")[2].partition(".end_amdgpu_metadata")[0]
    for block in re.split(r"(?m)^  - ", metadata)[1:]:
        if re.search(rf"(?m)^\s*\.name:\s+'?{re.escape(entry)}'?\s*$", block):
            items = re.split(r"(?m)^\s+- ", block.partition(".args:")[2].partition("    .group_segment")[0])[1:]
            found = []
            for item in items:
                fields = dict(re.findall(r"\.(\w+):\s+(\S+)", item))
                found.append(KernelArgument(int(fields["offset"]), int(fields["size"]), fields["value_kind"]))
            return found
    return []
