"""Command line: ``python -m figures draw``, ``list``, ``verdicts``, ``report``, ``readme``."""

from __future__ import annotations

import logging
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import typer

from figures import common, gallery
from repro import cli
from repro.experiments import tidy
from repro.measuring import quiet

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"


@app.command()
def draw(
    names: Annotated[list[str] | None, typer.Argument(help="figures; all if none")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="processes that draw side by side")] = 1,
) -> None:
    """Draw figures from what is on record; a gap in the data is named, never an error."""
    common.require_style(common.STYLE)
    chosen = list(dict.fromkeys(names or common.names()))  # two processes never write one file
    for name in chosen:
        common.require(name)
    if jobs == 1 or len(chosen) == 1:
        for name in chosen:
            _draw_here(name)
            print(common.shown(common.OUT / f"{name}.svg"), flush=True)
        return
    # Forked before anything has started a thread: a worker has all modules without importing them.
    with ProcessPoolExecutor(min(jobs, len(chosen)), mp_context=get_context("fork")) as pool:
        waiting = {pool.submit(_draw_here, name): name for name in chosen}
        failed: list[str] = []
        for future in as_completed(waiting):
            error = future.exception()
            if error is None:
                print(common.shown(common.OUT / f"{waiting[future]}.svg"), flush=True)
            else:
                failed.append(f"{waiting[future]}: {type(error).__name__}: {error}")
    if failed:
        raise RuntimeError("; ".join(sorted(failed)))


@app.command("list")
def list_() -> None:
    """List the figures, with the experiments each one shows."""
    for name in common.names():
        figure = common.module(name)
        print(f"{name:28} {', '.join(figure.EXPERIMENTS)}")


@app.command()
def verdicts() -> None:
    """Judge the claims, print the table and keep it beside the figures."""
    from figures import verdict_table

    common.require_style(common.STYLE)  # it names the folder
    rows = verdict_table.collect()
    print(verdict_table.text(rows, "simple_grid"))
    table = verdict_table.table(rows).to_csv(index=False, lineterminator="\n")
    common.write_text(common.OUT / "verdicts.csv", table)
    common.write_text(common.OUT / "verdicts.md", verdict_table.text(rows) + "\n")
    common.write_text(common.OUT / "verdicts.tex", verdict_table.latex(rows))
    place = common.shown(common.OUT / "verdicts.md")
    print(f"{len(rows)} claims; the same table is in {place}, verdicts.csv and verdicts.tex")


@app.command("import-results")
def import_(
    source: Annotated[Path, typer.Argument(help="what `make gpu-run OUT=...` left")],
) -> None:
    """Merge the records of a run elsewhere into results/, say what they show and which claims they
    change."""
    from figures import verdict_table
    from repro.import_results import import_results, report

    before = verdict_table.collect()
    print("\n".join(report(import_results(source))))
    print("\n".join(["", *verdict_table.changes(before, verdict_table.collect())]))


@app.command()
def readme() -> None:
    """Write the README's tables and pictures and the tables in docs/ from committed records."""
    from figures import memory_hierarchy, verdict_table

    page, rows = verdict_table.README, verdict_table.collect(local=False)
    common.write_text(
        page,
        verdict_table.readme_with(verdict_table.blocks(rows), page.read_text(encoding="utf-8")),
    )
    common.write_text(verdict_table.CLAIMS, verdict_table.claims_page(rows))
    levels = memory_hierarchy.page(tidy(memory_hierarchy.EXPERIMENTS, local=False))
    common.write_text(memory_hierarchy.PAGE, levels)
    common.write_text(gallery.PAGE, gallery.page())
    for name in gallery.IN_README:
        _draw(name, IMAGES, local=False)
        (IMAGES / f"{name}.csv").unlink()
        (IMAGES / f"{name}.png").unlink()


@app.command()
def report(
    to: Annotated[Path, typer.Option(help="the file to write")] = common.OUT / "report.html",
) -> None:
    """Write the report: verdicts, figures, calculator, formulas and provenance in one HTML file."""
    from figures.report import write

    size = write(to)
    print(f"{to.name}: {size / 1e6:.1f} MB, needs no other file")


def _draw_here(name: str) -> None:
    _draw(name, common.OUT, local=True)


def _draw(name: str, out: Path, *, local: bool) -> None:
    figure = common.module(name)
    style = common.STYLE if local else ""  # what is committed has one look
    with quiet.beside_others():
        common.style()
        drawing = figure.draw(tidy(figure.EXPERIMENTS, local=local))
        common.save(name, drawing, out, style=style)
        if style:
            common.write_text(out / f"{name}.txt", gallery.caption(name, drawing.figure))


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    sys.exit(cli.run(app))
