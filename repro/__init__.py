"""The attention operator, the checkpoint executor, instruments, experiments and records."""
