"""The views of `tgen inspect` on this terminal: those of `drawing`, and the training run's."""

from functools import partial

from tgen.cli import console
from tgen.cli.inspect.options import InspectOptions
from tgen.cli.inspect.sources import search_sources, source_rows
from tgen.cli.inspect.training_curves import training_lines
from tgen.cli.rich_console import out
from tgen.drawing.view_options import View
from tgen.drawing.views import VIEWS, Progress, Screen, ViewOutput, sources_output
from tgen.inspection.inspector import Inspector
from tgen.runs import log


def compute_view(view: View, inspector: Inspector, options: InspectOptions) -> ViewOutput:
    """Compute a view."""
    if view is View.training:
        records = log.read(inspector.bundle.path)
        return ViewOutput(records, lambda _: training_lines(records))
    if view is View.sources:
        text = b"".join(inspector.tokens)
        report = search_sources(inspector.bundle.named_path, text, options)
        return sources_output(report, source_rows(report))
    return VIEWS[view](inspector, options, progress_bar(options))


def current_screen(options: InspectOptions) -> Screen:
    """Return stdout as the screen."""
    return Screen(
        width=out.width,
        is_terminal=out.is_terminal,
        has_color=not out.no_color,
        fits=fits_lines(options),
    )


def progress_bar(options: InspectOptions) -> Progress:
    """Return the progress bar of long computations."""
    return partial(console.late_progress, quiet=options.quiet)


def fits_lines(options: InspectOptions) -> bool:
    """Whether lines must fit into the width of stdout: at a terminal, or with --width."""
    return out.is_terminal or options.width is not None
