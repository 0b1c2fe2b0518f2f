"""A small language model decodes with K and V in pages, and says what it says without a cache.

    python examples/decode_tiny_model.py

Random weights, three layers, 4 query heads on 2 heads of K and V. Two sequences go on from one
prompt: the pages that hold it are in memory once, and both tables name them. Each step writes K and
V of one token a sequence and calls ``repro.decode_attention``; beside it the same model runs over
the whole sequence again, with dense attention. The most likely tokens must be the same.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import repro

VOCABULARY, WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 97, 64, 3, 4, 2, 16
PAGE_SIZE, PAGES, PROMPT, STEPS = 16, 12, 32, 24


class PagedCache:
    """K and V of every layer, (layers, pages, page_size, Hkv, D), and which page holds what."""

    def __init__(self) -> None:
        shape = (LAYERS, PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM)
        self.k, self.v = torch.zeros(shape), torch.zeros(shape)
        self.free = list(range(PAGES))
        self.table = torch.zeros(0, PAGES, dtype=torch.int32)  # (sequences, pages at most)
        self.lengths = torch.zeros(0, dtype=torch.int32)

    def add(self, like: int | None = None) -> int:
        """A new sequence, empty or with all whole pages of another one. Its number."""
        row = torch.zeros(1, PAGES, dtype=torch.int32)
        length = 0
        if like is not None:
            length = int(self.lengths[like]) // PAGE_SIZE * PAGE_SIZE
            row[0] = self.table[like]
        self.table = torch.cat([self.table, row])
        self.lengths = torch.cat([self.lengths, torch.tensor([length], dtype=torch.int32)])
        return len(self.lengths) - 1

    def make_room(self, sequence: int, tokens: int) -> None:
        """Pages for the next tokens of a sequence; its length includes them from now on."""
        first, last = int(self.lengths[sequence]), int(self.lengths[sequence]) + tokens
        for page in range(-(-first // PAGE_SIZE), -(-last // PAGE_SIZE)):
            self.table[sequence, page] = self.free.pop(0)
        self.lengths[sequence] = last

    def write(self, layer: int, sequences: list[int], k: Tensor, v: Tensor) -> None:
        """K and V (B, Hkv, n, D) of the newest n tokens of these sequences."""
        for row, sequence in enumerate(sequences):
            end = int(self.lengths[sequence])
            places = torch.arange(end - k.shape[2], end)
            pages = self.table[sequence, places // PAGE_SIZE].long()
            self.k[layer, pages, places % PAGE_SIZE] = k[row].transpose(0, 1)
            self.v[layer, pages, places % PAGE_SIZE] = v[row].transpose(0, 1)


class Model(nn.Module):
    """Embeddings of tokens and places, blocks of attention and MLP, logits."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Embedding(PAGES * PAGE_SIZE, WIDTH)
        columns = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, columns) for _ in range(LAYERS))
        self.out = nn.ModuleList(nn.Linear(HEADS * HEAD_DIM, WIDTH) for _ in range(LAYERS))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(LAYERS)
        )
        self.logits = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, cache: PagedCache | None = None, sequences: list[int] | None = None) -> Tensor:
        """Logits (B, n, vocabulary) of tokens (B, n): the newest of cached sequences, or whole."""
        batch, n = tokens.shape
        places = torch.arange(n).expand(batch, n)
        if cache is not None and sequences is not None:
            for sequence in sequences:
                cache.make_room(sequence, n)
            places = cache.lengths[sequences, None] - n + torch.arange(n)
        x = self.token(tokens) + self.place(places)
        for layer in range(LAYERS):
            packed = self.qkv[layer](x).view(batch, n, -1, HEAD_DIM).transpose(1, 2)
            q, k, v = packed.split([HEADS, KV_HEADS, KV_HEADS], 1)
            if cache is None or sequences is None:
                mixed = dense(q, k, v)
            else:
                cache.write(layer, sequences, k, v)
                mixed = repro.decode_attention(
                    q,
                    cache.k[layer],
                    cache.v[layer],
                    seqlens_k=cache.lengths[sequences],
                    block_table=cache.table[sequences],
                )
            x = x + self.out[layer](mixed.transpose(1, 2).reshape(batch, n, -1))
            x = x + self.mlp[layer](x)
        return self.logits(x)


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of whole sequences, all scores stored."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = q @ k.mT / HEAD_DIM**0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ v


@torch.no_grad()
def decode(seed: int = 0) -> tuple[Tensor, Tensor, PagedCache]:
    """Tokens (2, steps + 1) with pages, the same without a cache, and the cache."""
    torch.manual_seed(seed)
    model, cache = Model(), PagedCache()
    prompt = torch.randint(VOCABULARY, (1, PROMPT))
    first = cache.add()
    for part in prompt.split(PAGE_SIZE, 1):  # as many queries at a time as the kernel takes
        model(part, cache, [first])
    pair = [first, cache.add(like=first)]

    paged = torch.randint(VOCABULARY, (2, 1))  # where the two part
    whole = torch.cat([prompt.expand(2, -1), paged], 1)
    for _ in range(STEPS):
        logits = model(paged[:, -1:], cache, pair)
        paged = torch.cat([paged, logits[:, -1:].argmax(-1)], 1)
        whole = torch.cat([whole, model(whole)[:, -1:].argmax(-1)], 1)
    return paged, whole[:, PROMPT:], cache


def main() -> None:
    """Decode both ways and compare."""
    paged, whole, cache = decode()
    for row in paged.tolist():
        print("tokens:", *row)
    agree = int((paged == whole).sum())
    print(f"{agree} of {paged.numel()} tokens are those of the model without a cache")
    shared = PROMPT // PAGE_SIZE
    used = PAGES - len(cache.free)
    print(f"pages: {used} in use, the prompt's {shared} by both sequences")
    if agree != paged.numel():
        raise SystemExit("the two ways disagree")


if __name__ == "__main__":
    main()
