"""Decoder-only transformers by their sizes: parameters, FLOPs, and the bytes a layer saves.

Two kinds. "gpt": layer norm, biases, an MLP of width 4h with GeLU, dropout, learned positions, the
embedding used again for the logits. "llama": RMS norm without biases, grouped keys and values,
rotary positions, a gated MLP (SiLU), no dropout, a matrix of its own for the logits unless they are
tied; Mistral and Qwen 2 are of this kind, Qwen 2 with a bias on q, k and v.

Letters: T = sequence x batch tokens, h hidden, d head dimension, a = heads · d, g = kv_heads · d,
f ffn, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from analysis.parallel_activations import LayerShape, saved_by_tensor

KINDS = ("gpt", "llama")
ATTENTION = ("flash", "standard")
FP32, HALF = 4, 2


@dataclass(frozen=True)
class Decoder:
    """Sizes of a decoder; half precision (2 bytes) wherever bytes are meant.

    Args:
        layers, hidden, heads, vocab: as the papers have them.
        seqlen: tokens of a sequence, and the learned positions of a "gpt".
        kind: "gpt" or "llama".
        kv_heads: heads of k and v; None: as many as ``heads``.
        ffn: width of the MLP; None: 4 · hidden.
        qkv_bias: of a "llama": whether q, k and v have a bias.
        head_dim: of a "llama"; None: hidden / heads.
        tied: of a "llama": whether the logits use the embedding, as those of a "gpt" do.

    Raises:
        ValueError: a size below 1, heads that do not divide hidden (unless head_dim is given),
            kv_heads that do not divide heads, an unknown kind, or a "gpt" with kv_heads, ffn or
            head_dim of its own.
    """

    layers: int
    hidden: int
    heads: int
    seqlen: int
    vocab: int = 50257
    kind: str = "gpt"
    kv_heads: int | None = None
    ffn: int | None = None
    qkv_bias: bool = False
    head_dim: int | None = None
    tied: bool = False

    def __post_init__(self) -> None:
        sizes = {
            "layers": self.layers,
            "hidden": self.hidden,
            "heads": self.heads,
            "seqlen": self.seqlen,
            "vocab": self.vocab,
            "kv_heads": self.groups,
            "ffn": self.width,
        }
        if self.head_dim is not None:
            sizes["head_dim"] = self.head_dim
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} = {size} is not positive")
        if self.kind not in KINDS:
            raise ValueError(f"kind {self.kind!r} is not one of {', '.join(KINDS)}")
        if self.head_dim is None and self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} is not a multiple of heads {self.heads}")
        if self.heads % self.groups:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.groups}")
        if self.kind == "gpt" and self.q_width != self.hidden:
            raise ValueError(
                f"a gpt has a head_dim of hidden / heads ({self.hidden} / {self.heads}), not "
                f"{self.head_dim}: kind llama has its own"
            )
        plain = self.groups == self.heads and self.width == 4 * self.hidden and not self.qkv_bias
        if self.kind == "gpt" and not plain:
            raise ValueError(
                f"a gpt has as many kv_heads as heads ({self.heads}) and an ffn of 4 · hidden "
                f"({4 * self.hidden}), not {self.groups} and {self.width}: kind llama has its own"
            )

    @property
    def groups(self) -> int:
        """Heads of k and v."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def width(self) -> int:
        """Width of the MLP."""
        return 4 * self.hidden if self.ffn is None else self.ffn

    @property
    def kv_width(self) -> int:
        """g: numbers of k, and of v, a token."""
        return self.head_width * self.groups

    @property
    def head_width(self) -> int:
        """d: the head dimension."""
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    @property
    def q_width(self) -> int:
        """a: numbers of q, and of the attention's result, a token."""
        return self.head_width * self.heads

    @property
    def one_embedding(self) -> bool:
        """Whether the logits use the embedding instead of a matrix of their own."""
        return self.tied or self.kind == "gpt"

    @property
    def parameters(self) -> int:
        """All weights and biases, embeddings and logits among them."""
        h, g, f, vocab = self.hidden, self.kv_width, self.width, self.vocab
        if self.kind == "gpt":
            layer = 12 * h * h + 13 * h  # 9 h of biases, 4 h of the two norms
            return self.layers * layer + 2 * h + (vocab + self.seqlen) * h
        a = self.q_width
        layer = 2 * h * a + 2 * h * g + 3 * h * f + 2 * h
        layer += (a + 2 * g) * self.qkv_bias
        return self.layers * layer + h + (1 if self.tied else 2) * vocab * h

    def saved_bytes(
        self, tokens: int, seqlen: int, attention: str = "flash", *, tensor: int = 1, sequence_parallel: bool = False
    ) -> dict[str, int]:
        """What a layer's two halves keep for their backward beside their inputs, in bytes.

        "gpt": Korthikanti et al. 2022, Eq. 1. "llama", with fused norms and products in half
        precision: the norm's result and one fp32 number a token (each half); q, k, v and the
        result of the attention; gate, SiLU(gate), up and their product:
        2 T (h + 2 a + 2 g) + 4 T and 2 T (h + 4 f) + 4 T. ``attention="flash"`` adds 4 bytes a
        row and head (log-sum-exp), "standard" the softmax output, 2 bytes a score.

        Args:
            tokens: T, all sequences of the micro-batch together.
            seqlen: of one of them.
            tensor: ranks that share out heads and the MLP; the bytes are of one of them.
            sequence_parallel: whether they share out the norms' results too.

        Raises:
            ValueError: tokens that are not whole sequences, an unknown attention, heads or (under
                sequence parallelism) tokens that do not divide among the ranks.
        """
        if attention not in ATTENTION:
            raise ValueError(f"attention={attention!r} is neither 'flash' nor 'standard'")
        if seqlen < 1 or tokens < 1 or tokens % seqlen:
            raise ValueError(f"{tokens} tokens are not whole sequences of {seqlen}")
        if self.heads % tensor or self.groups % tensor or self.width % tensor:
            raise ValueError(
                f"heads {self.heads}, kv_heads {self.groups} and ffn {self.width} do not divide among {tensor} ranks"
            )
        h, g, f = self.hidden, self.kv_width, self.width
        statistics = FP32 * self.heads * tokens // tensor
        if self.kind == "llama":
            if sequence_parallel and tokens % tensor:
                raise ValueError(f"{tokens} tokens do not divide among {tensor} ranks")
            outside = tokens // tensor if sequence_parallel else tokens
            scores = HALF * self.heads * tokens * seqlen // tensor
            norm = (HALF * h + FP32) * outside
            return {
                "attention": norm
                + HALF * tokens * (2 * self.q_width + 2 * g) // tensor
                + (statistics if attention == "flash" else scores),
                "mlp": norm + HALF * tokens * 4 * f // tensor,
            }
        shape = LayerShape(seqlen, tokens // seqlen, h, self.heads)
        saved = saved_by_tensor(
            shape,
            ranks=tensor,
            sequence_parallel=sequence_parallel,
            recompute="selective" if attention == "flash" else "none",
        )
        of_mlp = ("mlp_input", "gelu_input", "gelu_output", "mlp_dropout_mask")
        inputs = ("norm1_input", "norm2_input")
        rest = sum(size for name, size in saved.items() if name not in (*of_mlp, *inputs))
        return {
            "attention": int(rest) + (statistics if attention == "flash" else 0),
            "mlp": int(sum(saved[name] for name in of_mlp)),
        }

    def forward_flops(self, tokens: int, seqlen: int) -> dict[str, int]:
        """Products of the two halves of a layer, two FLOPs a multiply-add, scores in full."""
        found = {
            half: sum(2 * tokens * inputs * outputs for inputs, outputs in matrices)
            for half, matrices in self.matrices().items()
        }
        found["attention"] += 4 * tokens * seqlen * self.q_width
        return found

    def matrices(self) -> dict[str, list[tuple[int, int]]]:
        """(inputs, outputs) of every matrix that the two halves of a layer multiply a token by."""
        h, a, g, f = self.hidden, self.q_width, self.kv_width, self.width
        up = 2 if self.kind == "llama" else 1  # the gate beside it
        return {"attention": [(h, a + 2 * g), (a, h)], "mlp": [(h, up * f), (f, h)]}

    def logits_bytes(self, tokens: int) -> int:
        """Logits in fp32 (Korthikanti et al. 2022, §4.3: 4 s b v), which the loss keeps."""
        return FP32 * tokens * self.vocab
