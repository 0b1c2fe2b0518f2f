"""Work of a pass over packed sequences: the sum over the sequences."""

from __future__ import annotations

from dataclasses import replace

from analysis.hardware import Gpu
from analysis.hbm import HbmTraffic, compulsory_hbm
from analysis.packed import Lengths
from analysis.shapes import AttentionShape
from analysis.time_model import Work
from analysis.traffic import Traffic, predict_traffic
from repro.prediction.runs import Run, share_of_sms, works_of


def packed_works(
    run: Run, shape: AttentionShape, lengths: Lengths, pass_: str, gpu: Gpu, traffic: Traffic, hbm: HbmTraffic
) -> tuple[dict[str, Work], int]:
    """Work of every kernel of ``traffic``, and the FLOPs that the kernels execute."""
    alone = replace(run, options={k: x for k, x in run.options.items() if k != "lengths"})
    works = {
        kernel: Work(
            sm_bytes=sum(entries.values()), hbm_bytes=sum(hbm.reads[kernel].values()) + sum(hbm.writes[kernel].values())
        )
        for kernel, entries in traffic.kernels.items()
    }
    for each in lengths.shapes(shape):
        part = predict_traffic(run.algorithm, each.padded, run.tile, pass_, **alone.options)
        found, _ = works_of(alone, each, pass_, gpu, part, compulsory_hbm(part, each.padded))
        for kernel, work in found.items():
            if work.flops and kernel in works:
                works[kernel] = replace(
                    works[kernel],
                    flops=works[kernel].flops + work.flops,
                    exponentials=works[kernel].exponentials + work.exponentials,
                    shared_per_tensor=work.shared_per_tensor,
                    fma=work.fma,
                )
    for kernel, work in works.items():
        if work.flops:
            blocks = run.dq_blocks if kernel == "flash_backward_dq" else run.blocks
            works[kernel] = replace(work, efficiency=share_of_sms(run, shape, gpu, blocks))
    return works, sum(int(work.flops) for work in works.values())
