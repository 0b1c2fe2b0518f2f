"""Plans of whole modules: a chain of layers, and the code that recomputes some of them."""

from __future__ import annotations

from collections.abc import Sequence

from .chain import Chain, Stage


def layers_of(chain: Chain, size: int) -> Chain:
    """The chain whose stages are `size` of the given ones each, run and run again as one.

    ValueError where they do not come out even.
    """
    if size < 1 or len(chain) % size:
        raise ValueError(f"{len(chain)} stages are no whole number of layers of {size}")
    groups = [chain.stages[first : first + size] for first in range(0, len(chain), size)]
    return Chain(
        tuple(_joined(group) for group in groups),
        input_bytes=chain.input_bytes,
        input_gradient_bytes=chain.input_gradient_bytes,
    )


def _joined(parts: Sequence[Stage]) -> Stage:
    last, saved, lean, saving, before = parts[-1], 0, 0, 0, 0
    for part in parts:  # before: bytes of the result that the part runs on
        lean = max(lean, before + part.forward_temporary_bytes + (part.activation_bytes if part is not last else 0))
        saved += part.saved_bytes + (part.activation_bytes if part is not last else 0)
        saving, before = max(saving, part.saving_temporary_bytes), part.activation_bytes
    return Stage(
        last.activation_bytes,
        saved,
        gradient_bytes=last.gradient_bytes,
        forward_temporary_bytes=lean,
        saving_temporary_bytes=saving,
        backward_temporary_bytes=max(part.backward_temporary_bytes for part in parts),
        forward_s=sum(part.forward_s for part in parts),
        backward_s=sum(part.backward_s for part in parts),
    )


def checkpoint_code(recompute: Sequence[str], model: str = "model") -> str:
    """Python that lets torch alone recompute the modules of these names, two ways."""
    return (
        "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (\n"
        "    apply_activation_checkpointing,\n)\n"
        f"recompute = {{{model}.get_submodule(name) for name in {list(recompute)!r}}}\n"
        f"apply_activation_checkpointing({model}, check_fn=lambda m: m in recompute)\n"
        "# or, keeping the names of parameters as they are:\n"
        "# from functools import partial; from torch.utils.checkpoint import checkpoint\n"
        "# for block in recompute:\n"
        "#     block.forward = partial(checkpoint, block.forward, use_reentrant=False)\n"
    )
