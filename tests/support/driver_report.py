"""What launches of some problems reach the driver as, by both ways of launching; JSON.

    python tests/driver_report.py

"general": ``CupyBackend.launch``, as a driver calls it. "prepared": the same plan through
``CupyBackend.prepare``, first with the same addresses, then with others.
"""

from __future__ import annotations

import json
import threading
from typing import Any

import bare_image  # noqa: F401  first: it hides packages
import fake_driver

from kernels import attention
from kernels.launch import Array, contiguous_strides, encode
from kernels.launching.cupy_backend import CupyBackend
from kernels.launching.plan import Plan, record, replay

STREAM = 0xABC0
CALLS = 50
#: name -> algorithm, pass, q's shape, heads of k and v, whether the layout is (B, N, H, D), options
CASES: dict[str, tuple[str, str, tuple[int, int, int, int], int, bool, dict[str, Any]]] = {
    "persistent": ("flash-sm90", "forward", (2, 4, 300, 64), 2, False, {"causal": True}),
    "one tile": ("flash-sm90", "forward", (1, 2, 8192, 128), 2, True, {}),
    "optimistic": ("flash-sm90-optimistic", "forward", (1, 2, 640, 64), 2, False, {}),
    "backward": ("flash-sm90", "backward", (2, 4, 300, 128), 2, False, {"causal": True}),
    "in turns": ("flash-sm90-deterministic", "backward", (1, 2, 512, 64), 1, False, {}),
    "early forward": ("flash-sm90", "forward", (1, 2, 512, 64), 2, False, {"pdl": True}),
    "early": ("flash-sm90", "backward", (1, 2, 512, 64), 2, True, {"pdl": True}),
    "sm_80": ("flash", "forward", (1, 2, 100, 40), 1, False, {}),
}


def arrays_of(
    pass_: str, shape: tuple[int, int, int, int], kv_heads: int, rows_first: bool, base: int
) -> dict[str, Array]:
    """The arrays of a pass at made-up addresses."""

    def at(name: str, size: tuple[int, ...], dtype: str) -> Array:
        strides = contiguous_strides(size)
        if rows_first and len(size) == 4:
            _, heads, rows, columns = size
            strides = (rows * heads * columns, columns, heads * columns, 1)
        return Array(name, base + len(made) * (1 << 30), size, strides, dtype, "rw")

    made: dict[str, Array] = {}
    k_shape = (shape[0], kv_heads, *shape[2:])
    names = ("q", "k", "v", "out") + (("dout", "dq", "dk", "dv") if pass_ == "backward" else ())
    for name in names:
        made[name] = at(name, k_shape if name in ("k", "v", "dk", "dv") else shape, "bf16")
    made["lse"] = at("lse", shape[:3], "fp32")
    if pass_ == "backward" and shape[3] == 64:
        made["dlse"] = at("dlse", shape[:3], "fp32")
    return made


def plan_of(name: str, backend: CupyBackend, arrays: dict[str, Array]) -> Plan:
    """What the case launches."""
    algorithm, pass_, *_, options = CASES[name]

    def driver(recorder: Any, at: dict[str, Array]) -> None:
        operands = [at[n] for n in ("q", "k", "v", "out")]
        stats = {"lse": at["lse"]}
        if pass_ == "forward":
            attention.forward(recorder, algorithm, *operands, stats, scale=0.125, **options)
        else:
            attention.backward(
                recorder,
                algorithm,
                *operands,
                at["dout"],
                stats,
                at["dq"],
                at["dk"],
                at["dv"],
                scale=0.125,
                dlse=at.get("dlse"),
                **options,
            )

    return record(backend, arrays, driver)


class Scratch(CupyBackend):
    """Notes where its scratch is, and how wide the arguments of the next launch are."""

    def __init__(self, driver: fake_driver.FakeDriver) -> None:
        super().__init__()
        self.scratch: list[int] = []
        self.driver = driver

    def empty(self, name: str, shape: tuple[int, ...], dtype: str) -> Array:
        array = super().empty(name, shape, dtype)
        self.scratch.append(array.pointer)
        return array

    def launch(self, kernel: Any, grid: Any, shared_bytes: Any, args: Any, *rest: Any) -> None:
        self.driver.widths = [len(encode(arg)) for arg in args]
        super().launch(kernel, grid, shared_bytes, args, *rest)


def prepared(plan: Plan, backend: Scratch, addresses: list[int]) -> list[dict[str, Any]]:
    """The plan's launches through ``prepare``, one at a time: each has widths of its own."""
    for launch in plan.launches:
        backend.driver.widths = [len(encode(arg)) for arg in launch.args]
        backend.prepare([launch])(addresses, STREAM)
    return taken(backend.driver)


def taken(driver: fake_driver.FakeDriver) -> list[dict[str, Any]]:
    """What was noted since the last time."""
    found = list(driver.launches)
    driver.launches.clear()
    return found


def report() -> dict[str, Any]:
    driver = fake_driver.install()
    driver.note()
    backend = Scratch(driver)
    cases = {}
    for name, (_, pass_, shape, kv_heads, rows_first, _) in CASES.items():
        arrays = arrays_of(pass_, shape, kv_heads, rows_first, 1 << 33)
        plan = plan_of(name, backend, arrays)
        backend.scratch.clear()
        addresses = [array.pointer for array in arrays.values()]
        replay(plan, backend, addresses, STREAM)
        everywhere = [*addresses, *backend.scratch]
        cases[name] = {
            "general": taken(driver),
            "prepared": prepared(plan, backend, everywhere),
            "elsewhere": prepared(plan, backend, [a + (1 << 40) for a in everywhere]),
            "addresses": everywhere,
            "entries": [launch.kernel.entry for launch in plan.launches],
        }
    report = {"cases": cases, "lost": lost(plan, backend, everywhere)}
    driver.answer(1)  # CUDA_ERROR_INVALID_VALUE
    return report | {"refused": refusal(plan, backend, everywhere)}


def lost(plan: Plan, backend: Scratch, addresses: list[int]) -> int:
    """Of the launches of two threads at the same time: how many came without their addresses."""
    (launch,) = [one for one in plan.launches if len(one.args) > 6][:1]
    queue, driver = backend.prepare([launch]), backend.driver
    driver.widths = [len(encode(arg)) for arg in launch.args]
    far = 1 << 50

    def calls(base: int) -> None:
        for _ in range(CALLS):
            queue([address + base for address in addresses], STREAM)

    driver.delay_s = 1e-4
    threads = [threading.Thread(target=calls, args=(base,)) for base in (0, far)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = taken(driver)
    driver.delay_s = 0.0
    whole = 0
    for base in (0, far):
        own = {address + base for address in addresses}
        passed = [{argument[0] for argument in noted["arguments"]} for noted in found]
        whole += min(sum(own <= seen for seen in passed), CALLS)
    return 2 * CALLS - whole


def refusal(plan: Plan, backend: Scratch, addresses: list[int]) -> str:
    """What a launch says that the driver refuses."""
    try:
        backend.prepare(plan.launches)(addresses, STREAM)
    except RuntimeError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    print(json.dumps(report()))
