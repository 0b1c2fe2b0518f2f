"""Copies around the kernels: tensors whose rows the kernels cannot move 16 bytes at a time.

The operator copies such a tensor before the launch, rows padded with zeros to a multiple of 8
elements, and copies a result back without the padding. Each copy reads the tensor once and writes
it once.
"""

from collections.abc import Collection

from analysis.shapes import AttentionShape, bias_elements
from analysis.sums import KernelBytes

KERNEL = "copy"
"""The name that copies are counted under."""
OPERANDS = {"forward": (("q", "k", "v"), ("out",)), "backward": (("q", "k", "v", "out", "dout"), ("dq", "dk", "dv"))}
"""Pass -> (tensors of head_dim columns that it reads, those that it writes)."""


def copies(
    shape: AttentionShape,
    pass_: str,
    copied: Collection[str] = (),
    gradients: Collection[str] = ("dq", "dk", "dv"),
    bias: tuple[int, int] | None = None,
) -> KernelBytes:
    """Bytes of the copies of a pass; {} where it needs none.

    A head dimension that is no multiple of 8 copies every tensor.
    copied: tensors that are copied for their layout (a last dimension that is not contiguous, rows
        that do not start on a multiple of 16 bytes); "bias" where its last dimension has gaps.
    bias: its (items, heads).

    Raises ValueError for a name that is no tensor of the pass.
    """
    reads, writes = OPERANDS[pass_]
    known = (*reads, *writes, *(() if bias is None else ("bias",)))
    unknown = set(copied) - set(known)
    if unknown:
        raise ValueError(f"copied={sorted(unknown)}: the {pass_} has {', '.join(known)}")
    if pass_ == "backward":
        made = set(gradients) | ({"dk", "dv"} if {"dk", "dv"} & set(gradients) else set())
        writes = tuple(name for name in writes if name in made)
    padded = shape.padded
    everything = padded.head_dim != shape.head_dim
    entries = {}
    for name in (*reads, *writes):
        if not everything and name not in copied:
            continue
        keys = name.endswith(("k", "v"))
        size = shape.key_bytes if keys else shape.query_bytes
        larger = padded.key_bytes if keys else padded.query_bytes
        entries[name, "read"] = size
        entries[name, "write"] = larger if name in reads else size
    if bias is not None and "bias" in copied:
        size = bias_elements(shape, bias) * shape.itemsize
        entries |= {("bias", "read"): size, ("bias", "write"): size}
    return {KERNEL: entries} if entries else {}
