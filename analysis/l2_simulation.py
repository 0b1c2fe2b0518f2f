"""An LRU cache fed block by block: an independent check of the wave model's one rule.

``analysis.hbm`` derives re-reads from launch order alone. Here the same walk is executed: every
resident block steps through its head's keys and values chunk by chunk, each step looks its chunk
up in a least-recently-used cache, and misses are counted. With blocks in step the two agree to
the chunk. ``speed_spread`` lets blocks drift: nothing changes while the slowest trails the fastest
by less than the cache holds, and then reads multiply.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict


def simulate_walks(
    *,
    heads: int,
    blocks_per_head: int,
    chunks_per_walk: int,
    concurrent_blocks: int,
    cache_chunks: int,
    speed_spread: float = 0.0,
    seed: int = 0,
) -> int:
    """Chunks fetched from HBM when every block walks its head's chunks once.

    Blocks start head by head in launch order, ``concurrent_blocks`` at first and then one as
    soon as another ends. A resident slot steps in a time drawn once from
    [1 - speed_spread, 1 + speed_spread].
    """
    if min(heads, blocks_per_head, chunks_per_walk, concurrent_blocks, cache_chunks) < 1:
        raise ValueError("every count must be at least 1")
    if not 0 <= speed_spread < 1:
        raise ValueError(f"speed_spread={speed_spread} is outside [0, 1)")
    draw = random.Random(seed)
    blocks = heads * blocks_per_head
    slots = min(concurrent_blocks, blocks)
    step_time = [1 + speed_spread * (2 * draw.random() - 1) for _ in range(slots)]
    # (time, slot, block, next chunk); ties are served in slot order.
    ready = [(0.0, slot, slot, 0) for slot in range(slots)]
    started = slots
    cache: OrderedDict[tuple[int, int], None] = OrderedDict()
    misses = 0
    while ready:
        time, slot, block, chunk = heapq.heappop(ready)
        key = (block // blocks_per_head, chunk)
        if key in cache:
            cache.move_to_end(key)
        else:
            misses += 1
            cache[key] = None
            if len(cache) > cache_chunks:
                cache.popitem(last=False)
        if chunk + 1 < chunks_per_walk:
            heapq.heappush(ready, (time + step_time[slot], slot, block, chunk + 1))
        elif started < blocks:
            heapq.heappush(ready, (time + step_time[slot], slot, started, 0))
            started += 1
    return misses
