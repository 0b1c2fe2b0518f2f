"""The compiled forms of the Hopper kernels, and the rules that pick one for a shape.

Forward. A query tile has 64 rows for each consumer warpgroup. The scores of the next key tile are
multiplied during the softmax of this one (FlashAttention-3, Algorithm 2), for block_n / 2 more
registers a thread. Beside the shape of the tiles a form says

persistent
    one thread block a multiprocessor takes query tiles one after another, and multiplies the first
    scores of the next tile together with the last P V of this one
    (``flash_forward_sm90_persistent.cu``); otherwise one block a query tile
    (``flash_forward_sm90.cu``);
pingpong
    the warpgroups issue their products in turn (FlashAttention-3, §3.1);
packed
    sequences of different lengths one after another (``include/packed_sm90.cuh``), persistent;

Backward. A block has 128 keys and walks tiles of queries; ``dq_from_registers`` says how dq leaves
it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from analysis.algorithms import Family
from analysis.arguments import checked, one_of
from analysis.features import FEATURES
from analysis.shapes import Tile
from kernels.flash_config import DTYPE_CODE
from kernels.launch import Kernel, Pass, Size

WARPGROUP = 128
STAGES = 2
ALIGNMENT_SLACK = 1023  # swizzled tiles start on a multiple of 1024 bytes
BARRIER_BYTES = 8
#: By which what a producer passes on of two tiles of packed sequences exceeds their numbers.
PACKED_BYTES = 56
#: In which a block of the backward keeps where its packed sequence lies.
SEQUENCE_BYTES = 32
#: At 256 dk and dv together would take every register of a thread.
HEAD_DIMS = {"forward": (64, 128, 256), "backward": (64, 128)}
#: Options that a form may be compiled with beside a causal mask, which take one block a query tile.
MASKS_AND_SCORES = tuple(n for n, each in FEATURES.items() if Family.HOPPER in each.families and each.registers)
#: Query tiles that a block of the repair looks after at most (``flash_forward_sm90.cu``).
REPAIR_TILES = 256
#: Longest sequence of queries for which blocks stay and take several query tiles.
PERSISTENT_SEQLEN = 4096


@dataclass(frozen=True)
class ForwardForm:
    """One compiled form of the forward."""

    head_dim: int
    consumers: int
    block_n: int
    persistent: bool = False
    pingpong: bool = False
    packed: bool = False

    def __post_init__(self) -> None:
        if self.packed and not self.persistent:
            raise ValueError("packed=True is for blocks that stay, not persistent=False")

    @property
    def name(self) -> str:
        extras = {"persistent": self.persistent, "pingpong": self.pingpong, "packed": self.packed}
        tile = f"d{self.head_dim} {self.tile.block_m}x{self.block_n}"
        return ", ".join([tile, *(name for name, used in extras.items() if used)])

    @property
    def tile(self) -> Tile:
        return Tile(64 * self.consumers, self.block_n)

    @property
    def threads(self) -> int:
        return (self.consumers + 1) * WARPGROUP

    @property
    def shared_bytes(self) -> int:
        """Q, the K and V rings, 2 + 4·STAGES barriers and the slack.

        Persistent: two of Q and one of O; four barriers for the Qs and the numbers of their tiles.
        """
        return self._shared_bytes(self.persistent)

    def bytes_of(self, *, repair: bool = False, alibi: bool = False) -> int:
        """Shared memory of a kernel of the form; alibi: with a word for the head's slope."""
        own = self.repair_shared_bytes if repair else self.shared_bytes
        return own + (4 if alibi else 0)

    @property
    def repair_shared_bytes(self) -> int:
        """Those of one block a tile, and a word for each tile that a block looks after."""
        return self._shared_bytes(False) + 4 * REPAIR_TILES

    def _shared_bytes(self, persistent: bool) -> int:
        row = 2 * self.head_dim
        tiles = (3 if persistent else 1) * self.tile.block_m * row
        tiles += 2 * STAGES * self.block_n * row
        barriers = (4 + 4 * STAGES + 1 if persistent else 2 + 4 * STAGES) * BARRIER_BYTES
        return tiles + barriers + PACKED_BYTES * self.packed + ALIGNMENT_SLACK

    def kernel(self, dtype: str, causal: bool, part: str = "", *, features: Collection[str] = ()) -> Kernel:
        """The exact kernel; of the optimistic pair "optimistic" or "repair"; or "clear_counter".

        The repair is that of one block a tile whichever form flagged it. "clear_counter" sets the
        counter of the persistent form to 0. features: of ``MASKS_AND_SCORES``, and "sawtooth", in
        which every second wave walks the keys upwards; of the exact kernel with one block a tile,
        ValueError for others.
        """
        sawtooth = "sawtooth" in features
        if part == "clear_counter" and not self.persistent:
            raise ValueError(f"{self.name} has no counter to set to 0")
        if self.packed and part in ("optimistic", "repair"):
            raise ValueError(f"{self.name} is exact, not {part}")
        if sawtooth and (self.persistent or part):
            raise ValueError(
                f"{self.name}{part and ', '}{part} has no sawtooth: that is for the exact kernel with one block a tile"
            )
        asked = [name for name in MASKS_AND_SCORES if name in features]
        if asked and (self.persistent or part):
            raise ValueError(
                f"{self.name}{part and ', '}{part} has no {', '.join(asked)}: that is "
                "for the exact kernel with one block a tile"
            )
        persistent = self.persistent and part != "repair"
        macros = [
            ("DTYPE", DTYPE_CODE[dtype]),
            ("HEAD_DIM", self.head_dim),
            ("BLOCK_N", self.block_n),
            ("CONSUMERS", self.consumers),
            ("CAUSAL", int(causal)),
            ("STAGES", STAGES),
            ("SHARED_BYTES", self.bytes_of(repair=part == "repair", alibi="alibi" in features)),
        ]
        if self.pingpong:
            macros.append(("PINGPONG", 1))
        if self.packed:
            macros.append(("PACKED", 1))
        if part in ("optimistic", "repair"):
            macros.append(("OPTIMISTIC", {"optimistic": 1, "repair": 2}[part]))
        if sawtooth:
            macros.append(("SAWTOOTH", 1))
        macros += [(name.upper(), 1) for name in asked]
        stem = "flash_forward_sm90"
        source = f"{stem}_persistent.cu" if persistent else f"{stem}.cu"
        if part == "clear_counter":
            return Kernel(source, f"{stem}_{part}", tuple(macros), 32)
        words = (stem, "persistent" if persistent else "", part)
        return Kernel(source, "_".join(filter(None, words)), tuple(macros), self.threads, self)


#: Those that :func:`forward_form` picks, and one to be timed beside the third: what turns gain.
FORWARD_FORMS = (
    ForwardForm(64, 3, 128, pingpong=True),
    ForwardForm(64, 3, 128, persistent=True, pingpong=True),
    ForwardForm(128, 2, 128, pingpong=True),
    ForwardForm(128, 2, 128, persistent=True, pingpong=True),
    ForwardForm(128, 2, 176, pingpong=True),
    ForwardForm(256, 2, 80),
    ForwardForm(128, 2, 128),
)
#: Those of packed sequences, one a head dimension.
PACKED_FORMS = (
    ForwardForm(64, 3, 128, persistent=True, pingpong=True, packed=True),
    ForwardForm(128, 2, 128, persistent=True, pingpong=True, packed=True),
)


@checked
def forward_form(
    head_dim: int,
    causal: bool,
    seqlen_q: Size,
    tile: Tile | None = None,
    *,
    sawtooth: bool = False,
    featured: bool = False,
) -> ForwardForm:
    """The form for a shape; where a tile is asked for, :func:`form_of_tile`.

    featured: with a window, a softcap or ALiBi, which take one block a query tile whatever the
    length, and key tiles of 128: a window's edges are tiles that are partly used, and changed
    scores want registers beside themselves.

    head_dim 256 has one: two consumers, and the 80 keys that registers and shared memory leave.

    Tiles. head_dim 64: three consumers, whose 192 rows read K and V least; 128: two, since three
    would not have the registers for the scores of two tiles. Longer key tiles (176) pay off where
    few are ragged: without a mask and in long sequences.

    Blocks. Up to 4096 queries, persistent: there the ends of a tile are much of it. From 8192 on,
    one block a query tile: a prototype of both forms on an H200 found the persistent one 5 to 10 %
    ahead at 2048 and level or behind at 16384. Nothing was measured between 2048 and 16384: where
    the two cross is a guess.

    A sawtooth always takes one block a query tile: it pays where walks are long, and there the ends
    of a tile are little of it.

    Turns. At head_dim 64 the prototype gained 4 to 7 % by them. At 128 its optimistic softmax lost
    4 %, once, but few of its exponentials ran under P V; ours do, and the model of time says that
    without turns two warpgroups in step take a third to a half longer a round
    (``docs/pages/hopper.md``). At 256 they cost vector registers for descriptors. Together with
    persistent blocks turns were not measured.
    """
    if tile is not None:
        return form_of_tile(head_dim, tile)
    one_of("head_dim", head_dim, HEAD_DIMS["forward"])
    if head_dim == 256:
        return ForwardForm(256, 2, 80)
    persistent = seqlen_q <= PERSISTENT_SEQLEN and not (sawtooth or featured)
    if head_dim == 64:
        return ForwardForm(64, 3, 128, persistent, pingpong=True)
    short = causal or persistent or featured
    return ForwardForm(128, 2, 128 if short else 176, persistent, pingpong=True)


@checked
def packed_form(head_dim: int, tile: Tile | None = None) -> ForwardForm:
    """The form for packed sequences; a tile may be asked for, but there is one a head dimension.

    Persistent at every length. Sequences that are packed are short as a rule, and there the ends of
    a tile are much of it; and the search for a number's sequence, reads that wait for each other,
    runs under the products of the tile before. head_dim 256 has no persistent form, so none.

    ValueError lists the head dimensions, or the tiles, that there are.
    """
    forms = {form.head_dim: form for form in PACKED_FORMS}
    one_of("head_dim", head_dim, tuple(forms))
    form = forms[head_dim]
    if tile not in (None, form.tile):
        raise _no_tile("forward of packed sequences", head_dim, tile, [form.tile])
    return form


@checked
def form_of_tile(head_dim: int, tile: Tile) -> ForwardForm:
    """The forward form with a tile and one block for each. ValueError lists the tiles there are."""
    forms = [form for form in FORWARD_FORMS if form.head_dim == head_dim and not form.persistent]
    for form in forms:
        if form.tile == tile:
            return form
    raise _no_tile("forward", head_dim, tile, [form.tile for form in forms])


def _no_tile(pass_: str, head_dim: int, tile: Tile | None, tiles: list[Tile]) -> ValueError:
    assert tile is not None
    known = [(each.block_m, each.block_n) for each in tiles]
    return ValueError(
        f"the Hopper {pass_} has no tile ({tile.block_m}, {tile.block_n}) at head_dim {head_dim}; known: {known}"
    )


@dataclass(frozen=True)
class BackwardForm:
    """One compiled form of the backward: 128 keys, ``block_m`` queries.

    dq_from_registers: dq is added to memory from registers instead of by way of shared memory; in
        no order.
    """

    head_dim: int
    block_m: int
    dq_from_registers: bool = False

    @property
    def name(self) -> str:
        tile = f"d{self.head_dim} {self.block_m}x{self.tile.block_n}"
        return f"{tile}, direct" if self.dq_from_registers else tile

    @property
    def tile(self) -> Tile:
        return Tile(self.block_m, 128)

    @property
    def shared_bytes(self) -> int:
        """K, V, two stages of Q and dO, two buffers of dS, dQ unless it is added directly, the
        statistics, the barriers."""
        block_m, block_n = self.tile.block_m, self.tile.block_n
        row = 2 * self.head_dim
        tiles = 2 * block_n * row + 2 * STAGES * block_m * row + 2 * 2 * block_m * block_n
        dq = 0 if self.dq_from_registers else 4 * block_m * self.head_dim
        rest = 2 * STAGES * 4 * block_m + 8 * (1 + 4 * STAGES)
        return tiles + dq + rest + ALIGNMENT_SLACK

    def takes(self, dtype: str, features: Collection[str]) -> bool:
        """Whether these of window, softcap and alibi, together, leave it enough registers.

        At head_dim 64, whose scores take twice the registers, threads would spill up to 368 bytes
        with a softcap beside another, and 16 to 216 with that of fp16 alone, by the compiler's own
        count. With 80 queries a causal window would too, 24 bytes, and the rule picks that form for
        none of the three.
        """
        if self.block_m == 80:
            return not features
        if self.head_dim == 128 or "softcap" not in features:
            return True
        return dtype == "bf16" and len(features) == 1

    def bytes_of(self, *, alibi: bool = False, packed: bool = False) -> int:
        """Shared memory of the main kernel; alibi: with the head's slope beside each stage; packed:
        with where the block's sequence lies."""
        return self.shared_bytes + (4 * STAGES if alibi else 0) + SEQUENCE_BYTES * packed

    def spill_bytes(self, causal: bool) -> int:
        """Bytes that a thread stores to and loads from local memory a round, for want of registers.

        One register with 80 queries and a causal mask, which :func:`backward_form` does not pick.
        """
        return 8 if self.block_m == 80 and causal else 0

    @property
    def post_shared_bytes(self) -> int:
        """A tile of dq, its rows 8 elements apart from another."""
        return self.block_m * (self.head_dim + 8) * 2

    def kernel(
        self,
        part: str,
        dtype: str,
        causal: bool,
        *,
        deterministic: bool = False,
        dlse: bool = False,
        features: Collection[str] = (),
    ) -> Kernel:
        """The main kernel (part "") or what runs around it, "preprocess" or "postprocess", which
        knows nothing of ``features``, those of ``MASKS_AND_SCORES``, "sawtooth" and "packed", but
        for the last.

        ValueError for a fixed order of additions in the form that has none, for a sawtooth in one
        that adds dq directly or in a fixed order, for what it has no registers for (:meth:`takes`),
        and for packed sequences beside any of them, in a sawtooth or in the form that adds dq
        directly.
        """
        asked = [name for name in MASKS_AND_SCORES if name in features]
        packed, sawtooth = "packed" in features, "sawtooth" in features
        if packed and (asked or sawtooth or self.dq_from_registers):
            raise ValueError(f"{self.name}: packed sequences go with a causal mask and turns alone")
        if not part and not self.takes(dtype, asked):
            raise ValueError(f"{self.name} has no {' and '.join(asked)} in {dtype}, for want of registers")
        if deterministic and self.dq_from_registers:
            raise ValueError(f"{self.name} adds dq in no fixed order: deterministic=True needs one")
        if sawtooth and (deterministic or self.dq_from_registers):
            raise ValueError(
                f"{self.name}, deterministic={deterministic} has no sawtooth: that is for tiles of "
                "dq that are added as a whole, in no order"
            )
        threads = {"": 3 * WARPGROUP, "preprocess": WARPGROUP, "postprocess": 2 * WARPGROUP}[part]
        macros = [("DTYPE", DTYPE_CODE[dtype]), ("HEAD_DIM", self.head_dim), ("BLOCK_M", self.block_m)]
        if not part:
            macros += [
                ("CAUSAL", int(causal)),
                ("SHARED_BYTES", self.bytes_of(alibi="alibi" in features, packed=packed)),
            ]
            macros += [(name.upper(), 1) for name in asked]
        if deterministic and part != "postprocess":
            macros.append(("DETERMINISTIC", 1))
        if self.dq_from_registers and not part:
            macros.append(("DQ_FROM_REGISTERS", 1))
        if sawtooth and not part:
            macros.append(("SAWTOOTH", 1))
        if dlse and part == "preprocess":
            macros.append(("DLSE", 1))
        if packed:
            macros.append(("PACKED", 1))
        stem = "flash_backward_sm90"
        source = f"{stem}_rows.cu" if part else f"{stem}.cu"
        return Kernel(source, f"{stem}_{part}" if part else stem, tuple(macros), threads, self)


#: Every form of the backward, for tests and tuning. One adds dq directly: a prediction to be tried.
BACKWARD_FORMS = (
    BackwardForm(64, 128),
    BackwardForm(128, 64),
    BackwardForm(128, 80),
    BackwardForm(128, 64, dq_from_registers=True),
)


@checked
def backward_form(head_dim: int, causal: bool, tile: Tile | None = None, *, featured: bool = False) -> BackwardForm:
    """The form for a shape, or of a tile that is asked for; ValueError lists those there are.

    featured: with a window, a softcap or ALiBi.

    head_dim 128: without a mask 80 queries a tile, which ask 5 % less of shared memory than 64
    (``analysis.sm_ceilings``); a prototype on an H200 had both level at 2048 keys (the records of
    prototype-time). With a mask, 64 waste less on its edge, and with a feature 80 leave it too few
    registers. No form is picked that adds dq
    directly: none has been timed.
    """
    if tile is not None:
        return _backward_form_of_tile(head_dim, tile)
    one_of("head_dim", head_dim, HEAD_DIMS["backward"])
    if head_dim == 64:
        return BackwardForm(64, 128)
    return BackwardForm(128, 64 if causal or featured else 80)


def _backward_form_of_tile(head_dim: int, tile: Tile) -> BackwardForm:
    forms = [form for form in BACKWARD_FORMS if form.head_dim == head_dim and not form.dq_from_registers]
    for form in forms:
        if form.tile == tile:
            return form
    raise _no_tile("backward", head_dim, tile, [form.tile for form in forms])


@checked
def form_for(
    head_dim: int, pass_: Pass, seqlen_q: Size, features: Collection[str] = (), tile: Tile | None = None
) -> ForwardForm | BackwardForm:
    """The form that a pass of a problem runs with.

    features: names of ``analysis.features``. tile: asked for by the caller.
    """
    causal, packed = "causal" in features, "packed" in features
    featured = not set(MASKS_AND_SCORES).isdisjoint(features)
    if pass_ == "backward":
        return backward_form(head_dim, causal, tile, featured=featured or packed)
    if packed:
        return packed_form(head_dim, tile)
    sawtooth = "sawtooth" in features
    return forward_form(head_dim, causal, seqlen_q, tile, sawtooth=sawtooth, featured=featured)
