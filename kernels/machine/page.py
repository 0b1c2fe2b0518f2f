"""The page of what the executor understands: ``python -m repro dev machine-code`` writes it."""

from __future__ import annotations

from tabulate import tabulate

from kernels.machine.decode import CONVERSIONS
from kernels.machine.table import OPCODES, SPECIAL_REGISTERS
from kernels.pages import Block

BLOCK = Block("machine-code.md", "opcodes", "repro dev machine-code")
PRODUCTS = {
    "HMMA": "`16816`, `1688`, `1684`; `F32`, `F16`; `BF16`, `TF32`",
    "HGMMA": "`64xNxK`; `F32`, `F16`; `BF16`, `TF32`",
    "QGMMA": "`64xNx32`; `F32`; `E4M3`, `E5M2`",
    "BRA": "`U`, `U.ANY`, `U.ALL`, `DIV`, `CONV`",
}


def table() -> str:
    """A line an opcode: its modifiers and where its meaning is documented."""
    rows = []
    for name in sorted({*OPCODES, *PRODUCTS}):
        opcode = OPCODES.get(name, OPCODES["HGMMA"])
        modifiers = [*(f"`{modifier}`" for modifier in sorted(opcode.modifiers))]
        modifiers += [f"`{modifier}`" for modifier in CONVERSIONS.get(name, ())]
        rows.append((f"`{name}`", PRODUCTS.get(name, ", ".join(modifiers)), opcode.source))
    registers = ", ".join(f"`{name}`" for name in SPECIAL_REGISTERS)
    return (
        tabulate(rows, ("opcode", "modifiers", "meaning from"), tablefmt="pipe")
        + f"\n\nSpecial registers: {registers}."
    )


def main() -> None:
    """Writes the page's table."""
    BLOCK.write(table())
