"""Claims about training: several ranks, offloading, optimiser states."""
