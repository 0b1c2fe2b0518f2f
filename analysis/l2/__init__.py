"""What is left of the SM-boundary traffic behind a simulated L2.

The cache: two partitions where the chip has two. A line has a home in one of them, by a hash of its
address; what an SM reads goes through its own partition, which keeps a copy of lines whose home is
the other one. So what all SMs read takes two lines of the whole, and what one SM reads between one
and two. Sets of 16 ways, chosen by a hash that spreads consecutive lines evenly, least recently
used replaced first; misses fetch sectors of 32 bytes; writes and atomic additions happen at the
line's home and go to HBM when the line is evicted.

The blocks: in launch order on the SMs, as many at a time as fit, the next one where one has ended.
Every step of a block moves a tile of each tensor it walks. Blocks on one SM share it: in the last
wave, where an SM may hold fewer than it could, each of them is faster, runs ahead of the others,
and once the distance exceeds the cache, what it fetched is fetched again.

``launch`` runs any launch, ``attention`` builds those of the attention kernels, ``machine`` holds
every parameter with its origin, ``closed_forms`` the cases that have a formula. ``analysis.hbm``
asks for what reaches HBM.
"""

from analysis.l2.launch import Count, Launch, UnavailableError, available, replay, simulate
from analysis.l2.machine import L2, PACES, SOURCES, Pace

__all__ = ["L2", "PACES", "SOURCES", "Count", "Launch", "Pace", "UnavailableError", "available", "replay", "simulate"]
