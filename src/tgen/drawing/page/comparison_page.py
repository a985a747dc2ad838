"""The page of `tgen compare --html`: one file without scripts, no network access."""

from jinja2 import Environment, PackageLoader, StrictUndefined

from tgen.drawing.comparison import SCALES, comparison_plot, comparison_remarks, comparison_tables
from tgen.drawing.curve_files import svg
from tgen.reports.comparison import ComparisonReport, Scale


def comparison_page(report: ComparisonReport, scale: Scale) -> str:
    """Return the page: the curves over each scale, first `scale`, and the tables."""
    loader = PackageLoader("tgen.drawing.page", "")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    plots = {one: comparison_plot(report, one) for one in SCALES}
    return environment.get_template("comparison.html.j2").render(
        plots={SCALES[one]: svg(plot) for one, plot in plots.items() if plot.curves},
        first=SCALES[scale],
        tables=comparison_tables(report),
        remarks=comparison_remarks(report),
    )
