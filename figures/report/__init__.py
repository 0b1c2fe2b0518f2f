"""The report: one HTML file with verdicts, figures, a calculator, formulas and provenance.

Everything is inside the file (SVG, CSV, MathML, scripts), so it works offline and in an archive.
"""

from figures.report.page import write

__all__ = ["write"]
