"""The rows of ``analysis.features``: each option's whole description, in modules by what it changes."""
