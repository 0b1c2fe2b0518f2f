"""The run on a rented GPU: its plan, the run itself, and judging what it brought back."""
