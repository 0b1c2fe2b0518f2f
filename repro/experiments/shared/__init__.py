"""What several experiments, and the figures and claims that read them, have in common."""
