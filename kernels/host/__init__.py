"""Run CUDA kernels on the host, counted and checked.

A kernel source is compiled by the system's C++ compiler against ``vocabulary.hpp``; the threads
of a block are fibers, blocks are spread over the cores. Every global access adds to a counter per
tensor and direction. These are errors (:class:`KernelError`) that name kernel, block and thread:

* an access through a plain pointer, which would not be counted: pointers of a kernel lead to
  addresses without memory, and only the functions of the vocabulary know where the bytes are;
* an integer division by zero (where the processor notices), a trap, an access of memory outside
  all tensors, more local variables or deeper recursion than a stack of 64 KiB holds;
* a thread that runs for 60 s (``REPRO_HOST_LIMIT_S``) without coming to a barrier or its end. An
  interrupt (Ctrl-C) ends a launch within a fraction of a second.

With checks on, so are these:

* global memory: an access outside its tensor or between the rows of a strided view, one that is
  not aligned to its size, one against the declared access ("r", "w", "rw", "atomic"), a read of
  scratch or of a "w" tensor before it was written, an element of a "w" tensor left unwritten;
* shared memory: an access outside the dynamic size, a misaligned one, a read of bytes never
  written;
* a data race in either: two accesses of which one writes, by threads that no barrier orders.
  Lanes of a warp are ordered by ``warp_sync`` or ``block_sync`` only; mma, ldmatrix and shuffles
  order nothing. A ``cp_async`` destination belongs to nobody until its thread has waited, and to
  that thread alone until the next barrier. Blocks are never ordered;
* a barrier that some thread never reaches, a barrier reached from different lines, a warp
  collective that only some lanes reach;
* a turn (``turn_wait``, ``turn_pass``) that no earlier block passes on, that is passed on before
  its bulk additions are complete, or by a thread that did not wait for it.
"""

from kernels.host.backend import HostBackend, KernelError
from kernels.host.compiler import HostCompileError

__all__ = ["HostBackend", "HostCompileError", "KernelError"]
