"""``make check K=flash_decode``: the decoding kernels in a few forms, as ``repro.check`` runs the
passes of the ladder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from analysis.decode import DecodeShape
from analysis.sums.decode import flash_decode
from analysis.traffic import Traffic
from kernels.decode_config import configure
from kernels.launch import Kernel

SOURCES = ("flash_decode.cu", "flash_decode_merge.cu")
#: Largest error of out for N(0, 1), as in the kernels' tests.
BOUNDS = {"fp16": 3e-3, "bf16": 2e-2, "fp32": 1e-5}
SEQLENS, PAGE_SIZE, SPLITS = (330, 200, 0, 1), 48, (1, 3)


@dataclass(frozen=True)
class DecodeSubject:
    """A step of decoding with a number of splits."""

    shape: DecodeShape
    splits: int

    @property
    def name(self) -> str:
        """As in "decode d=64 bf16 fp8 cache, 3 splits"."""
        blocks = f"a scale for {self.shape.scale_block} keys"
        forms = [
            text
            for text, wanted in (
                ("fp8 cache", self.shape.fp8),
                (blocks, self.shape.scale_block is not None),
                ("latent", self.shape.latent),
            )
            if wanted
        ]
        form = f"d={self.shape.head_dim} {self.shape.dtype} {' '.join(forms)}".rstrip()
        return f"decode {form}, {self.splits} split{'s' * (self.splits > 1)}"

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """What it launches."""
        config = configure(
            self.shape.dtype,
            self.shape.head_dim,
            self.shape.rows,
            seqlens=True,
            paged=True,
            fp8=self.shape.fp8,
            scale_blocks=self.shape.scale_block is not None,
            latent=self.shape.latent,
            split=self.splits > 1,
        )
        merging = (config.merge_kernel(),) if self.splits > 1 else ()
        return (config.kernel(), *merging)


def subjects(head_dim: int, dtype: str) -> Iterator[DecodeSubject]:
    """Grouped heads, three queries, ragged pages; fp8 and latent caches; whole and split."""
    plain = DecodeShape(4, 2, 3, SEQLENS, head_dim, dtype, page_size=PAGE_SIZE, ragged=True)
    forms = [plain, replace(plain, latent=True)]
    if dtype != "fp32" and head_dim % 16 == 0:
        forms += [replace(plain, fp8=True), replace(plain, fp8=True, scale_block=PAGE_SIZE)]
    for shape in forms:
        for splits in SPLITS:
            yield DecodeSubject(shape, splits)


def wrong(subject: DecodeSubject) -> list[str]:
    """What is wrong on the host backend: results beyond their bound, bytes not as predicted."""
    from kernels.host import HostBackend
    from repro.instruments.decode_work import DecodeOperands

    shape, backend = subject.shape, HostBackend()
    operands = DecodeOperands(shape, "cpu")
    operands.launch(backend, subject.splits)
    found = []
    for item, keys in enumerate(shape.seqlens):
        if keys < shape.seqlen_q:  # rows that see nothing have no weights to compare
            rows = operands.out[item, :, : shape.seqlen_q - keys]
            if bool(rows.count_nonzero()):
                found.append(f"sequence {item}: rows that see no key are not 0")
            continue
        error = max(operands.error(item, head) for head in range(shape.kv_heads))
        if not error <= BOUNDS[shape.dtype]:
            found.append(f"sequence {item}: out is off by {error:.3g}, {BOUNDS[shape.dtype]:g} may")
    tile = configure(shape.dtype, shape.head_dim, shape.rows, latent=shape.latent).tile
    predicted = Traffic(flash_decode(shape, tile, subject.splits)).kernels
    for kernel in dict.fromkeys((*backend.traffic, *predicted)):
        counted, expected = backend.traffic.get(kernel, {}), predicted.get(kernel, {})
        for key in dict.fromkeys((*counted, *expected)):
            pair = counted.get(key, 0), expected.get(key, 0)
            if pair[0] != pair[1]:
                found.append(f"{kernel} {' '.join(key)}: {pair[0]} B counted, {pair[1]} predicted")
    return found
