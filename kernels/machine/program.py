"""Run compiled kernels of anyone, here, without a GPU: results, and what they moved.

from kernels.machine import load
counts = load("kernel.cubin").launch("name", grid=(4, 1, 1), threads=128, args=[x, y, np.int32(n)])
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from kernels.machine import elf, native
from kernels.machine.arguments import BANK_BASE, MODULE, Memory, constant_bank, parameter_bytes
from kernels.machine.decode import Decoded, decode, disassemble, lines_of
from kernels.machine.operands import NotUnderstoodError

DIRECTIONS = ("read", "write", "atomic")
PRODUCTS = ("exact", "fast")
MUFU = ("rounded", "above", "below")
#: Shared memory that a block may have, by architecture; Hopper keeps 1 KiB of it for itself.
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}
SHARED_BASE = {80: 0, 90: 1024}
STEP_LIMIT = 200_000_000


class MachineError(RuntimeError):
    """A kernel did what it must not, or does not end.

    Attributes: kernel, block, warp, address (of the instruction), instruction.
    """

    def __init__(self, text: str, kernel: str, block: int, warp: int, address: int, at: str):
        where = f"{kernel}: block {block}, warp {warp}, 0x{max(address, 0):x} {at}"
        super().__init__(f"{where}: {text}")
        self.kernel, self.block, self.warp, self.address = kernel, block, warp, address
        self.instruction = at


@dataclass(frozen=True)
class Traffic:
    """What warps asked of memory: requests, sectors of 32 bytes, bytes of threads.

    misses: the sectors that cross to L2, if L1 keeps all that a block reads by it. Writes do, and
    reads that pass L1 by (TMA, ``cp.async.cg``, volatile ones).
    """

    requests: int
    sectors: int
    nbytes: int
    misses: int

    def __add__(self, other: Traffic) -> Traffic:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Traffic(*(a + b for a, b in pairs))


@dataclass(frozen=True)
class SharedTraffic:
    """Accesses of warps to shared memory; a conflict is a wavefront beyond the least."""

    accesses: int
    wavefronts: int
    conflicts: int


@dataclass(frozen=True)
class Counts:
    """What a launch did.

    traffic: (argument's number, direction) -> :class:`Traffic`; absent: nothing.
    fields: (argument's number, field, direction) -> the same, of the arrays in a ``Struct``.
    local: direction -> the same, of what threads keep in local memory, as spilled registers.
    executed: instructions of warps by opcode; threads: of threads.
    shared: "read" and "write" of shared memory.
    """

    traffic: dict[tuple[int, str], Traffic]
    fields: dict[tuple[int, str, str], Traffic]
    local: dict[str, Traffic]
    executed: Counter[str]
    threads: Counter[str]
    shared: dict[str, SharedTraffic]

    @property
    def divergence(self) -> float:
        """Share of a warp's threads that were off in an instruction, on average."""
        warps = sum(self.executed.values())
        return 1 - sum(self.threads.values()) / (32 * warps) if warps else 0.0

    def nbytes(self, argument: int, direction: str) -> int:
        """Bytes that threads moved."""
        found = self.traffic.get((argument, direction))
        return found.nbytes if found else 0


@dataclass(frozen=True)
class _Code:
    decoded: list[Decoded]
    packed: np.ndarray


class Program:
    """A cubin, parsed once; its entries are decoded when they are first launched."""

    def __init__(self, data: bytes):
        self.data = data
        self.cubin = elf.read(data)
        self._codes: dict[str, _Code] = {}

    @property
    def entries(self) -> tuple[str, ...]:
        return tuple(sorted(self.cubin.entries))

    @cached_property
    def text(self) -> str:
        """nvdisasm's listing."""
        return disassemble(self.data)

    def code(self, entry: str) -> list[Decoded]:
        """Decoded instructions of an entry. NotUnderstoodError names what has no meaning here."""
        return self._code(entry).decoded

    def _code(self, entry: str) -> _Code:
        self.cubin.entry(entry)
        if entry not in self._codes:
            lines, labels = lines_of(self.text, entry)
            decoded = decode(lines, labels, self._symbol)
            self._codes[entry] = _Code(decoded, _pack(decoded))
        return self._codes[entry]

    def launch(
        self,
        entry: str,
        grid: tuple[int, int, int],
        threads: int | tuple[int, int, int],
        shared_bytes: int = 0,
        args: Sequence[Any] = (),
        *,
        blocks: Sequence[int] | None = None,
        products: str = "exact",
        mufu: str = "rounded",
        adversarial: bool = False,
        seed: int = 0,
        workers: int | None = None,
        step_limit: int = STEP_LIMIT,
    ) -> Counts:
        """Run a kernel; NumPy arrays among the arguments are changed in place.

        Args:
            entry: name of the entry point.
            grid: blocks.
            threads: of a block.
            shared_bytes: dynamic shared memory of a block.
            args: NumPy arrays, NumPy scalars, None, TensorMap and Struct, in the kernel's order.
            blocks: numbers of the blocks to run, x first; None: all.
            products: "exact", tensor cores to the bit, or "fast", in fp32.
            mufu: the special function unit "rounded" correctly, or off by its worst error.
            adversarial: copies and products arrive as late as they may, warps run in drawn order.
            workers: threads of this machine; None: one a core.
            step_limit: instructions of a warp, after which it is taken not to end.

        Raises:
            ValueError, TypeError: no such entry, arguments that do not match, sizes.
            NotUnderstoodError: an instruction without a meaning here.
            MachineError: a fault, in one line.
        """
        found = self.cubin.entry(entry)
        shape = (threads, 1, 1) if isinstance(threads, int) else tuple(threads)
        self._check(found, grid, shape, shared_bytes)  # type: ignore[arg-type]
        code = self._code(entry)
        memory = Memory()
        parameters = parameter_bytes(found, args, memory)
        local = -(-(found.local_bytes + 1024) // 16) * 16
        bank = constant_bank(self.cubin, found, parameters, grid, shape, local)  # type: ignore[arg-type]
        banks = self._banks(entry, bank, memory)
        chosen = None if blocks is None else np.ascontiguousarray(blocks, dtype=np.int64)
        total = grid[0] * grid[1] * grid[2]
        if chosen is not None and chosen.size and not 0 <= chosen.min() <= chosen.max() < total:
            raise ValueError(f"blocks {chosen.min()} to {chosen.max()} of a grid of {total}")
        count = total if chosen is None else chosen.size
        tallies = np.zeros((len(memory.slots) + 1, len(DIRECTIONS)), dtype=native.TALLY)
        executed, lanes = (np.zeros(len(code.packed), dtype=np.uint64) for _ in range(2))
        shared = np.zeros(6, dtype=np.uint64)
        ranges = memory.table()
        stop = ctypes.c_int(0)
        architecture = self.cubin.architecture
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        native_arguments = native.LaunchArguments(
            code=code.packed.ctypes.data,
            code_count=len(code.packed),
            ranges=ranges.ctypes.data,
            range_count=len(ranges),
            tallies=tallies.ctypes.data,
            slot_count=len(tallies),
            executed=executed.ctypes.data,
            lanes=lanes.ctypes.data,
            shared=shared.ctypes.data,
            block_count=count,
            shared_bytes=found.shared_bytes + shared_bytes,
            shared_base=SHARED_BASE[architecture],
            architecture=architecture,
            local_bytes=local,
            workers=max(1, min(workers or cores, count)),
            resident=max(132, 1),
            exact_products=int(products == "exact"),
            mufu=MUFU.index(mufu),
            adversarial=int(adversarial),
            seed=seed + 1,
            step_limit=step_limit,
            stop=ctypes.addressof(stop),
            chosen=None if chosen is None else chosen.ctypes.data,
            dynamic_shared=shared_bytes,
            map_base=BANK_BASE - elf.FIRST_PARAMETER[architecture],
        )
        for axis in range(3):
            native_arguments.grid[axis] = grid[axis]
            native_arguments.block[axis] = shape[axis]
        for number, content in banks.items():
            native_arguments.banks[number] = content.ctypes.data
            native_arguments.bank_bytes[number] = content.nbytes
        failure = native.Failure()
        status = _run(native_arguments, failure, stop)
        if status == 1:
            at = next((d.text for d in code.decoded if d.address == failure.address), "")
            raise MachineError(
                failure.text.decode(errors="replace"), entry, failure.block, failure.warp, failure.address, at
            )
        return _counts(code.decoded, memory.slots, tallies, executed, lanes, shared)

    def _check(
        self, entry: elf.Entry, grid: tuple[int, int, int], block: tuple[int, int, int], shared_bytes: int
    ) -> None:
        if len(grid) != 3 or min(grid) < 1:
            raise ValueError(f"{entry.name}: a grid of {tuple(grid)} blocks")
        if len(block) != 3 or min(block) < 1 or block[0] * block[1] * block[2] > 1024:
            raise ValueError(f"{entry.name}: {tuple(block)} threads; 1 to 1024 a block")
        limit = SHARED_LIMIT[self.cubin.architecture]
        if not 0 <= entry.shared_bytes + shared_bytes <= limit:
            raise ValueError(
                f"{entry.name}: {entry.shared_bytes} static and {shared_bytes} dynamic bytes of "
                f"shared memory; a block has at most {limit}"
            )

    # ---- the module's variables and constants

    @cached_property
    def _variables(self) -> dict[str, np.ndarray]:
        found = {}
        for name in (".nv.global.init", ".nv.global"):
            section = self.cubin.sections.get(name)
            if section is not None and section.nbytes:
                data = np.zeros(section.nbytes, dtype=np.uint8)
                data[: len(section.data)] = np.frombuffer(section.data, dtype=np.uint8)
                found[name] = data
        return found

    def _variable_address(self, memory: Memory, section: str) -> int:
        return memory.address(self._variables[section], MODULE)

    def _symbol(self, name: str) -> int:
        raise NotUnderstoodError(f"the address of {name}")

    def _banks(self, entry: str, bank0: np.ndarray, memory: Memory) -> dict[int, np.ndarray]:
        banks = {0: bank0}
        for number in range(1, native.BANKS):
            for name in (f".nv.constant{number}.{entry}", f".nv.constant{number}"):
                section = self.cubin.sections.get(name)
                if section is not None and section.data:
                    content = np.frombuffer(section.data, dtype=np.uint8).copy()
                    self._relocate(name, content, memory)
                    banks[number] = content
        return banks

    def _relocate(self, name: str, content: np.ndarray, memory: Memory) -> None:
        """Writes addresses of variables into a constant bank."""
        names = list(self.cubin.sections)
        for prefix, size in ((".rel", 16), (".rela", 24)):
            section = self.cubin.sections.get(prefix + name)
            if section is None:
                continue
            for at in range(0, len(section.data), size):
                place, info = struct.unpack_from("<QQ", section.data, at)
                added = struct.unpack_from("<q", section.data, at + 16)[0] if size == 24 else 0
                _, home, value, _ = self.cubin.symbols[info >> 32]
                if home < len(names) and names[home] in self._variables:
                    address = self._variable_address(memory, names[home]) + value + added
                    content[place : place + 8] = np.frombuffer(struct.pack("<Q", address), dtype=np.uint8)


def load(source: str | Path | bytes) -> Program:
    """A compiled kernel file, or its bytes. ValueError for anything that is no cubin."""
    data = source if isinstance(source, bytes) else Path(source).read_bytes()
    return Program(data)


def _pack(decoded: list[Decoded]) -> np.ndarray:
    numbers = native.operations()
    packed = np.zeros(len(decoded), dtype=native.INSTRUCTION)
    for k, d in enumerate(decoded):
        row = packed[k]
        row["op"], row["guard"], row["guard_flags"] = (numbers[d.operation], d.guard, d.guard_flags)
        row["address"], row["target"], row["index"] = d.address, d.target, k
        row["mod"] = [value & 0xFF for value in d.mod]
        for slot, o in enumerate(d.slots):
            row["o"][slot] = (o.kind, o.reg, o.flags, o.part, o.ureg, o.bank, o.scale, o.wide, o.value)
    return packed


def _run(arguments: native.LaunchArguments, failure: native.Failure, stop: ctypes.c_int) -> int:
    """In a thread of its own, so that Ctrl-C reaches this one."""
    status = [0]

    def work() -> None:
        status[0] = native.library().machine_launch(ctypes.byref(arguments), ctypes.byref(failure))

    native.library()
    thread = threading.Thread(target=work)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.2)
    except BaseException:
        stop.value = 1
        thread.join()
        raise
    return status[0]


def _directions(row: np.ndarray) -> dict[str, Traffic]:
    cells = zip(DIRECTIONS, row.tolist(), strict=True)
    return {direction: Traffic(*cell) for direction, cell in cells if cell[2]}


def _counts(
    decoded: list[Decoded],
    slots: list[tuple[int, str]],
    tallies: np.ndarray,
    executed: np.ndarray,
    lanes: np.ndarray,
    shared: np.ndarray,
) -> Counts:
    traffic: dict[tuple[int, str], Traffic] = {}
    fields: dict[tuple[int, str, str], Traffic] = {}
    nothing = Traffic(0, 0, 0, 0)
    for (number, field), row in zip(slots, tallies[:-1], strict=True):
        for direction, found in _directions(row).items():
            traffic[number, direction] = traffic.get((number, direction), nothing) + found
            if field:
                fields[number, field, direction] = fields.get((number, field, direction), nothing) + found
    warps: Counter[str] = Counter()
    threads: Counter[str] = Counter()
    for d, n, t in zip(decoded, executed.tolist(), lanes.tolist(), strict=True):
        if n:
            warps[d.opcode] += n
            threads[d.opcode] += t
    reads, writes = shared[:3].tolist(), shared[3:].tolist()
    return Counts(
        traffic,
        fields,
        _directions(tallies[-1]),
        warps,
        threads,
        {name: SharedTraffic(a, b, b - c) for name, (a, b, c) in (("read", reads), ("write", writes))},
    )
