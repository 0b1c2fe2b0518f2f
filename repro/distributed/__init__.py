"""Several ranks: sharded model states, tensor and sequence parallel layers, ring attention.

Everything here runs under an existing launcher (``torchrun``) and existing engines
(DistributedDataParallel, ZeroRedundancyOptimizer, FSDP2) of torch.distributed.
"""
