"""Decoders by their sizes: known numbers of parameters, and the bytes that a layer really saves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

import repro
from analysis.decoders import Decoder
from analysis.hardware import gpu_named
from analysis.rank_memory import Ranks, parameters_of
from analysis.serving import decoding_step
from repro.commands.chains import PRESETS, decoder_of

#: What the authors' own checkpoints hold.
PARAMETERS = {
    "gpt2-small": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-7b": 7_615_616_512,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_those_of_the_published_weights(name: str) -> None:
    assert PRESETS[name].parameters == PARAMETERS[name]


class FusedNorm(torch.autograd.Function):
    """RMS norm as fused kernels do it: the input and one fp32 number a row are kept."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).to(x.dtype) * weight

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        x, weight, scale = ctx.saved_tensors
        normed, weighted = x * scale, gradient * weight
        through = weighted - normed * (weighted * normed).mean(-1, keepdim=True)
        return (through * scale).to(x.dtype), (gradient * normed).flatten(0, -2).sum(0).to(x.dtype)


class Half(nn.Module):
    """Attention or gated MLP of a "llama" layer, with its norm and its residual, as one of
    ``tensor`` ranks has it; the sums over ranks save nothing and are left out."""

    def __init__(self, decoder: Decoder, kind: str, tensor: int = 1) -> None:
        super().__init__()
        h = decoder.hidden
        own, g, f = decoder.q_width // tensor, decoder.kv_width // tensor, decoder.width // tensor
        sizes = {
            "attention": {"q": (h, own), "k": (h, g), "v": (h, g), "o": (own, h)},
            "mlp": {"gate": (h, f), "up": (h, f), "down": (f, h)},
        }[kind]
        for name, (wide, narrow) in sizes.items():
            self.add_module(name, nn.Linear(wide, narrow, bias=False, dtype=torch.bfloat16))
        self.weight = nn.Parameter(torch.ones(h, dtype=torch.bfloat16))
        self.decoder, self.kind = decoder, kind
        self.heads, self.groups = decoder.heads // tensor, decoder.groups // tensor

    def rotated(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[2]), 10000 ** -torch.linspace(0, 1, x.shape[3]))
        turned = torch.cat((-x[..., 1::2], x[..., ::2]), -1)
        return x * angles.cos().to(x) + turned * angles.sin().to(x)

    def forward(self, x: Tensor) -> Tensor:
        normed = FusedNorm.apply(x, self.weight)
        if self.kind == "mlp":
            return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        batch, length, _ = x.shape
        q, k, v = (
            matrix(normed).view(batch, length, heads, -1).transpose(1, 2)
            for matrix, heads in ((self.q, self.heads), (self.k, self.groups), (self.v, self.groups))
        )
        out = repro.flash_attention(self.rotated(q), self.rotated(k), v)
        return x + self.o(out.transpose(1, 2).reshape(batch, length, -1))


def saved_bytes(module: Half, x: Tensor) -> int:
    """Storages that the graph keeps beside parameters, the input, and sines and cosines."""
    known = {p.untyped_storage().data_ptr() for p in (*module.parameters(), x)}
    kept: dict[int, Tensor] = {}
    angles = (x.shape[1], module.decoder.head_width)

    def pack(tensor: Tensor) -> Tensor:
        at = tensor.untyped_storage().data_ptr()
        if at not in known and tuple(tensor.shape) != angles:
            kept[at] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        module(x).sum().backward()
    assert all(p.grad is not None for p in module.parameters())
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize(("kv_heads", "tensor", "head_dim"), [(1, 1, None), (4, 1, None), (4, 2, None), (2, 1, 24)])
def test_a_layer_saves_what_the_formula_says(kv_heads: int, tensor: int, head_dim: int | None) -> None:
    batch, length = 2, 48
    decoder = Decoder(1, 64, 4, length, 100, "llama", kv_heads, ffn=88, head_dim=head_dim)
    x = torch.randn(batch, length, 64, dtype=torch.bfloat16, requires_grad=True)
    expected = decoder.saved_bytes(batch * length, length, tensor=tensor)
    for kind in ("attention", "mlp"):
        assert saved_bytes(Half(decoder, kind, tensor), x) == expected[kind]


NEMO = {"hidden": 5120, "layers": 40, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn": 14336, "vocab": 131072}
LLAMA_1B = {"hidden": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "ffn": 8192, "vocab": 128256, "tied": True}


@pytest.mark.parametrize(("sizes", "released"), [(NEMO, 12_247_782_400), (LLAMA_1B, 1_235_814_400)])
def test_a_head_dimension_of_its_own_and_tied_logits(sizes: dict[str, int], released: int) -> None:
    """Against the weights that the authors publish (Mistral Nemo, Llama 3.2 1B)."""
    decoder = decoder_of("llama", sizes)
    assert decoder.parameters == released
    assert parameters_of(decoder, Ranks(), 0) == released
    in_layer = sum(a * b for half in decoder.matrices().values() for a, b in half)
    words = decoder.vocab * decoder.hidden
    weights = decoder.layers * in_layer + (1 if decoder.tied else 2) * words
    assert decoding_step(decoder, gpu_named("H200"), context=64).weight_bytes == 2 * weights


def test_sizes_that_do_not_fit_are_refused() -> None:
    small = Decoder(2, 64, 4, 32)
    for changes, said in [
        ({"hidden": 65}, "hidden 65 is not a multiple of heads 4"),
        ({"layers": 0}, "layers = 0 is not positive"),
        ({"kind": "bert"}, "kind 'bert' is not one of gpt, llama"),
        ({"head_dim": 32}, r"a gpt has a head_dim of hidden / heads \(64 / 4\), not 32"),
        ({"head_dim": 0}, "head_dim = 0 is not positive"),
        ({"kv_heads": 2}, "a gpt has as many kv_heads as heads"),
        ({"kind": "llama", "kv_heads": 3}, "heads 4 is not a multiple of kv_heads 3"),
    ]:
        with pytest.raises(ValueError, match=said):
            replace(small, **changes)
    with pytest.raises(ValueError, match="100 tokens are not whole sequences of 32"):
        small.saved_bytes(100, 32)
    with pytest.raises(ValueError, match="'sparse' is neither 'flash' nor 'standard'"):
        small.saved_bytes(64, 32, "sparse")
    with pytest.raises(ValueError, match="model 'llama' has the sizes that you give it: --heads"):
        decoder_of("llama", {"hidden": 64, "layers": 2, "heads": None})
    assert decoder_of("llama", {"hidden": 64, "layers": 2, "heads": 4}).kv_width == 64
    assert decoder_of("llama3-8b", {"layers": 2}) == replace(PRESETS["llama3-8b"], layers=2)
