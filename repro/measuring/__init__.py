"""How a number is measured and kept: cells, the machine, a quiet moment, progress, records."""
