"""Claims about gradient checkpointing."""
