"""Training systems around attention: offload, host optimiser, accumulation, mixed types."""
