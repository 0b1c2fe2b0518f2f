"""The report: one HTML file with figures, verdicts, predictions, formulas and provenance.

Everything is inside the file (SVG, CSV, MathML, script), so it works offline and in an archive.
"""

from figures.report.page import write

__all__ = ["write"]
