"""The ceilings of the time model and the memory hierarchy of a card, measured by probe kernels.

Bandwidth: HBM (read, copy), SM boundary (tiles that L2 holds, read by every SM), shared memory, the
host link in both directions. Rates: tensor cores by mma.sync and by the library's matrix product
(on Hopper the former cannot reach the peak), exponentials. Latency: a chain of dependent loads
through L2 and through HBM. The datasheet's figures are the predictions.
"""

from __future__ import annotations

from collections.abc import Callable

from analysis.hardware import find_gpu
from repro.experiments import Cell, Context, Experiment, Row, row

BLOCKS_PER_SM = 4
#: Probe -> (metric, unit).
PROBES = {
    "hbm-read": ("bandwidth", "TB/s"),
    "hbm-copy": ("bandwidth", "TB/s"),
    "sm-boundary-read": ("bandwidth", "TB/s"),
    "shared-memory-read": ("bandwidth", "TB/s"),
    "host-to-device": ("bandwidth", "TB/s"),
    "device-to-host": ("bandwidth", "TB/s"),
    "mma-sync": ("throughput", "TFLOP/s"),
    "matmul": ("throughput", "TFLOP/s"),
    "exp2": ("throughput", "Texp/s"),
    "l2-latency": ("latency", "ns"),
    "hbm-latency": ("latency", "ns"),
}


def cells() -> list[Cell]:
    """One per probe."""
    return [Cell(implementation=name) for name in PROBES]


def predict(one: Cell) -> list[Row]:
    """The H200's datasheet where it says anything."""
    gpu = find_gpu("NVIDIA H200")
    assert gpu is not None
    sheet = {
        "hbm-read": gpu.hbm_bandwidth_bytes_per_s,
        "hbm-copy": gpu.hbm_bandwidth_bytes_per_s,
        "sm-boundary-read": gpu.l2_bandwidth_bytes_per_s,
        "shared-memory-read": gpu.shared_bandwidth_bytes_per_s,
        "mma-sync": gpu.fp16_tensor_flops,
        "matmul": gpu.fp16_tensor_flops,
        "exp2": gpu.exp_per_s,
    }
    rate = sheet.get(str(one["implementation"]))
    return [] if rate is None else [_row(one, rate / 1e12, "datasheet")]


def measure(one: Cell, context: Context) -> list[Row]:
    """Work of one launch over its event-timed median."""
    from repro.instruments.timing import TorchDevice, time_work

    name = str(one["implementation"])
    amount, run = _prepare(name)
    timing = time_work(run, TorchDevice(), budget_ms=200.0, max_repeats=50)
    seconds = timing.median_ms / 1e3
    value = seconds / amount * 1e9 if name.endswith("latency") else amount / seconds / 1e12
    return [_row(one, value, "CUDA events, median, L2 flushed")]


def _prepare(name: str) -> tuple[float, Callable[[], object]]:
    """How much one launch does (bytes, FLOPs, exponentials or steps), and the launch."""
    import torch

    from kernels.beside import probes
    from kernels.launch import Array
    from repro.attention.launcher import launcher_for
    from repro.attention.views import array_of

    device = torch.device("cuda")
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    blocks = BLOCKS_PER_SM * sms
    if name == "matmul":
        a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
        return 2.0 * 8192**3, lambda: a @ a
    if name.endswith(("to-device", "to-host")):
        host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(256 << 20, dtype=torch.uint8, device=device)
        to, source = (there, host) if name == "host-to-device" else (host, there)
        return float(host.numel()), lambda: to.copy_(source, non_blocking=True)

    def flat(mebibytes: int, access: str = "r") -> Array:
        values = torch.zeros(mebibytes << 18, dtype=torch.float32, device=device)
        return array_of("buffer", values).with_access(access)

    any_tensor = torch.empty(1, device=device)

    def launch(call: Callable[..., int], *args: object) -> Callable[[], int]:
        def run() -> int:
            with launcher_for(any_tensor.device) as backend:
                return call(backend, *args)

        return run

    if name.endswith("latency"):
        # 128-byte lines. 1 MiB stays in L2 and, walked in a cycle, never in L1; of 1 GiB no line is
        # met twice.
        mebibytes, steps = (1, 200_000) if name == "l2-latency" else (1024, 20_000)
        links = torch.from_numpy(probes.chain(mebibytes << 18, 32)).to(device)
        chain = Array("links", links.data_ptr(), (links.numel(),), (1,), "int32", "r", links)
        return float(steps), launch(probes.chase, chain, steps)
    if name == "hbm-read":
        run = launch(probes.read, flat(2048), blocks)
    elif name == "hbm-copy":
        run = launch(probes.copy, flat(2048), flat(2048, "w"), blocks)
    elif name == "sm-boundary-read":
        # 16 MiB are held by each half of a two-partition L2.
        run = launch(probes.tile_read, flat(16), 2 * sms)
    elif name == "shared-memory-read":
        run = launch(probes.shared, blocks, 2000)
    elif name == "mma-sync":
        run = launch(probes.mma, blocks, 4000, "bf16")
    elif name == "exp2":
        run = launch(probes.exp2, blocks, 4000)
    else:
        raise ValueError(f"no probe {name!r}; known: {', '.join(PROBES)}")
    return float(run()), run


def _row(one: Cell, value: float, tool: str) -> Row:
    metric, unit = PROBES[str(one["implementation"])]
    return row(metric, value, unit=unit, tool=tool)


EXPERIMENT = Experiment("gpu-ceilings", cells, predict, measure, device="cuda", seconds=20)
