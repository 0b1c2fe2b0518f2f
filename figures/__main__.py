"""Command line: ``python -m figures draw``, ``list``, ``verdicts``, ``report``, ``readme``."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import pandas
import typer

from figures import common, gallery
from repro import cli
from repro.claims import Claim
from repro.experiments import tidy
from repro.measuring import quiet

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"


@app.command()
def draw(
    names: Annotated[list[str] | None, typer.Argument(help="figures; all if none")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="processes that draw side by side")] = 1,
    verdicts: Annotated[bool, typer.Option("--verdicts", help="judge the claims as well")] = False,
) -> None:
    """Draw figures from what is on record; a gap in the data is named, never an error."""
    common.require_style(common.STYLE)
    chosen = list(dict.fromkeys(names or common.names()))  # two processes never write one file
    for name in chosen:
        common.require(name)
    work, todo, rows = _draw_here, tuple(chosen), []
    if verdicts:  # in the same processes, which know the predictions already
        from figures import verdict_table

        work, todo = partial(_judge_and_draw, drawn=frozenset(chosen)), verdict_table.judges()
    for name, found in _each(work, todo, jobs):
        rows += found
        if name in chosen:
            print(common.shown(common.OUT / f"{name}.svg"), flush=True)
    if verdicts:
        _keep_verdicts(verdict_table.ordered(rows))


def _each(work: Callable[[str], list[Claim]], names: Sequence[str], jobs: int) -> Iterator[tuple[str, list[Claim]]]:
    """Each name with what ``work`` says of it, in the order in which they are done.

    RuntimeError at the end names all that failed, where several processes are at work.
    """
    if jobs == 1 or len(names) == 1:
        for name in names:
            yield name, work(name)
        return
    # Forked before anything has started a thread: a worker has all modules without importing them.
    with ProcessPoolExecutor(min(jobs, len(names)), mp_context=get_context("fork")) as pool:
        waiting = {pool.submit(work, name): name for name in names}
        failed: list[str] = []
        for future in as_completed(waiting):
            error = future.exception()
            if error is None:
                yield waiting[future], future.result()
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
    _keep_verdicts(verdict_table.collect())


def _keep_verdicts(rows: Sequence[Claim]) -> None:
    from figures import verdict_strip, verdict_table

    print(verdict_table.text(rows, "simple_grid"))
    common.style()
    drawing = common.Drawing(verdict_strip.draw(rows), verdict_table.table(rows))
    common.save("verdicts", drawing, common.OUT, style="")
    common.write_text(common.OUT / "verdicts.tex", verdict_table.latex(rows))
    # The last of them: Make goes by its date.
    common.write_text(common.OUT / "verdicts.md", verdict_table.text(rows) + "\n")
    place = common.shown(common.OUT / "verdicts.md")
    print(f"{len(rows)} claims; the same table is in {place}, verdicts.csv and verdicts.tex")


@app.command("import-results")
def import_(source: Annotated[Path, typer.Argument(help="what `make gpu-run OUT=...` left")]) -> None:
    """Merge the records of a run elsewhere into results/, say what they show and which claims they
    change."""
    from figures import verdict_table
    from repro.gpu.import_results import import_results, report

    before = verdict_table.collect()
    print("\n".join(report(import_results(source))))
    print("\n".join(["", *verdict_table.changes(before, verdict_table.collect())]))


@app.command()
def readme() -> None:
    """Write the README's tables and pictures and the tables in docs/ from committed records."""
    from figures import verdict_strip, verdict_table
    from figures.bytes import memory_hierarchy

    page, rows = verdict_table.README, verdict_table.collect(local=False)
    common.write_text(page, verdict_table.readme_with(verdict_table.blocks(rows), page.read_text(encoding="utf-8")))
    start, readme_text = verdict_table.INDEX, page.read_text(encoding="utf-8")
    common.write_text(start, verdict_table.start_page(readme_text, start.read_text(encoding="utf-8")))
    common.write_text(verdict_table.CLAIMS, verdict_table.claims_page(rows))
    levels = memory_hierarchy.page(tidy(memory_hierarchy.EXPERIMENTS, local=False))
    common.write_text(memory_hierarchy.PAGE, levels)
    common.write_text(gallery.PAGE, gallery.page())
    for name in gallery.CHOSEN:
        _draw(name, IMAGES, local=False)
    common.style()
    common.save("verdicts", common.Drawing(verdict_strip.draw(rows), verdict_table.table(rows)), IMAGES, style="")
    for name in (*gallery.CHOSEN, "verdicts"):
        (IMAGES / f"{name}.csv").unlink()
        (IMAGES / f"{name}.png").unlink()


@app.command()
def report(to: Annotated[Path, typer.Option(help="the file to write")] = common.OUT / "report.html") -> None:
    """Write the report: figures, verdicts, predictions, formulas, provenance in one HTML file."""
    from figures.report import write

    size = write(to)
    print(f"{to.name}: {size / 1e6:.1f} MB, needs no other file")


def _draw_here(name: str) -> list[Claim]:
    _draw(name, common.OUT, local=True)
    return []


def _judge_and_draw(name: str, drawn: frozenset[str]) -> list[Claim]:
    from figures import verdict_table

    if name == verdict_table.APART:
        return verdict_table.judge(name)
    frame = tidy(common.module(name).EXPERIMENTS)
    judged = verdict_table.judge(name, frame.copy())
    if name in drawn:
        _draw(name, common.OUT, local=True, frame=frame)
    return judged


def _draw(name: str, out: Path, *, local: bool, frame: pandas.DataFrame | None = None) -> None:
    figure = common.module(name)
    style = common.STYLE if local else ""  # what is committed has one look
    with quiet.beside_others():
        common.style()
        shown = tidy(figure.EXPERIMENTS, local=local) if frame is None else frame
        drawing = figure.draw(shown)
        common.save(name, drawing, out, style=style)
        if style:
            common.write_text(out / f"{name}.txt", gallery.caption(name, drawing.figure))


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    sys.exit(cli.run(app))
