"""Other packages' names for attention, computed by this package's kernels."""
