"""The L2 of ``analysis.l2``, written plainly in Python, and the blocks that walk through it."""

from __future__ import annotations

import heapq

import numpy as np

from analysis.l2 import L2, Count, Launch, Pace
from analysis.l2.launch import (
    ALWAYS,
    ATOMIC,
    BLOCK,
    FIRST,
    FIRST_BIT,
    LAST,
    LAST_BIT,
    NOT_FIRST,
    NOT_LAST,
    READ,
    STREAM,
)


class PlainL2:
    """Sectors one by one; lists of lines, the one used last in front."""

    MASK = (1 << 64) - 1

    def __init__(self, l2: L2, launch: Launch) -> None:
        self.l2, self.launch = l2, launch
        self.sets = [[[] for _ in range(l2.sets)] for _ in range(l2.partitions)]
        self.valid: list[set[int]] = [set() for _ in range(l2.partitions)]
        self.dirty: set[int] = set()
        self.counts = {name: [0, 0, 0, 0] for name in launch.sizes}
        self.owner = {}
        self.touched: set[int] = set()
        stride = int(0.6180339887 * l2.sets) | 1
        while np.gcd(stride, l2.sets) != 1:
            stride += 1
        self.stride = stride

    def mix(self, x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) & self.MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & self.MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & self.MASK
        return x ^ (x >> 31)

    def front(self, side: int, line: int) -> None:
        k, run = line % self.l2.sets, line // self.l2.sets
        ways = self.sets[side][(k * self.stride + self.mix(run)) % self.l2.sets]
        if line in ways:
            ways.remove(line)
        elif len(ways) == self.l2.ways:
            gone = ways.pop()
            for sector in range(4 * gone, 4 * gone + 4):
                self.valid[side].discard(sector)
                if sector in self.dirty and side == self.home(gone):
                    self.dirty.remove(sector)
                    self.counts[self.owner[sector]][1] += 32
        ways.insert(0, line)

    def home(self, line: int) -> int:
        return self.mix(~line & self.MASK) & 1 if self.l2.partitions > 1 else 0

    def move(self, sm: int, first: int, end: int, kind: int, tensor: int) -> None:
        name = list(self.launch.sizes)[tensor]
        for line in range(first // 128, (end - 1) // 128 + 1):
            inside = range(max(first // 32, 4 * line), min((end - 1) // 32, 4 * line + 3) + 1)
            side, home = sm % self.l2.partitions, self.home(line)
            missing = set(inside)
            if kind == READ:
                self.front(side, line)
                missing -= self.valid[side]
                self.valid[side] |= set(inside)
                if missing and home != side:
                    self.front(home, line)
                    held = missing & self.valid[home]
                    self.valid[home] |= missing
                    missing -= held
            else:
                for other in range(self.l2.partitions):
                    if other != home:
                        self.valid[other] -= set(inside)
                self.front(home, line)
                missing = missing - self.valid[home] if kind == ATOMIC else set()
                self.valid[home] |= set(inside)
                self.dirty |= set(inside)
            self.counts[name][0] += 32 * len(missing)
            for sector in inside:
                self.owner[sector] = name
                if sector not in self.touched:
                    self.touched.add(sector)
                    self.counts[name][3] += 32

    def result(self) -> dict[str, Count]:
        for sector in self.dirty:
            self.counts[self.owner[sector]][2] += 32
        return {name: Count(*found) for name, found in self.counts.items()}


def plainly(launch: Launch, l2: L2, sms: int, slots: int, pace: Pace) -> dict[str, Count]:
    """Every block in time order through a PlainL2."""
    cache = PlainL2(l2, launch)
    speed = 1 + pace.spread * np.random.default_rng(pace.seed).uniform(-1, 1, sms)
    blocks = [dict(zip(BLOCK, row.tolist(), strict=True)) for row in launch.blocks]
    running = dict(enumerate(range(min(sms * slots, len(blocks)))))
    started = len(running)
    heap = [(0.0, slot, -1) for slot in running]
    while heap:
        time, slot, step = heapq.heappop(heap)
        sm, block = slot % sms, blocks[running[slot]]
        if step < 0:
            for r in launch.ranges[block["before"] : block["before"] + block["befores"]].tolist():
                cache.move(sm, *r)
            step = 0
        if step < block["steps"]:
            for event in tile_events(launch, block, step):
                cache.move(sm, *event)
            active = sum(s % sms == sm for s in running)
            rate = min(slots / active, pace.lone_speedup) if active < slots else 1.0
            heapq.heappush(heap, (time + speed[sm] / rate, slot, step + 1))
            continue
        for r in launch.ranges[block["after"] : block["after"] + block["afters"]].tolist():
            cache.move(sm, *r)
        if started < len(blocks):
            running[slot] = started
            started += 1
            heapq.heappush(heap, (time, slot, -1))
        else:
            del running[slot]
    return cache.result()


def tile_events(launch: Launch, block: dict[str, int], step: int):
    tile, visit = block["start"] + block["direction"] * step, set()
    if block["list"] >= 0:
        entry = int(launch.tiles[block["list"] + step])
        tile = entry % FIRST_BIT
        visit = {FIRST} if entry & FIRST_BIT else {NOT_FIRST}
        visit |= {LAST} if entry & LAST_BIT else {NOT_LAST}
    for row in launch.streams[block["stream"] : block["stream"] + block["streams"]].tolist():
        s = dict(zip(STREAM, row, strict=True))
        if s["when"] != ALWAYS and s["when"] not in visit:
            continue
        head = s["first"] + tile // s["tiles"] * s["head_bytes"]
        first = head + tile % s["tiles"] * s["tile_bytes"]
        end = min(first + s["tile_bytes"], head + s["head_bytes"])
        yield first, end, s["kind"], s["tensor"]
