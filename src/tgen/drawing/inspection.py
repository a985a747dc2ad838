"""A view as a value: its numbers, and the text and HTML that a terminal or a notebook shows."""

import base64
import io
from dataclasses import asdict, dataclass, is_dataclass
from html import escape
from typing import Any

from rich.console import Console

from tgen.drawing.heat_map_files import svg
from tgen.drawing.page.attention_page import attention_page
from tgen.drawing.terminal_text import printable
from tgen.drawing.view_options import MATRIX_VIEWS, View, ViewOptions
from tgen.drawing.views import VIEWS, Screen, ViewOutput, no_progress
from tgen.errors import UsageError
from tgen.inspection.inspector import Inspector

_WIDTH = 100  # columns
_HEIGHT = 860  # pixels of the frame of a page
_PAGE_OPTIONS = {"layer", "head", "measure", "ablate", "scale", "sampling"}
_BLOCK = '<pre style="line-height: 1.25; overflow-x: auto; white-space: pre">{code}</pre>'


@dataclass(frozen=True, repr=False)
class Inspection:
    """A view of a text, which notebooks show and `print` writes as text.

    `data` has the fields of `tgen inspect --json` under the name of the view, with tokens as bytes
    and matrices as NumPy arrays, beside the `ids` and tokens of the `text`. `html` is a document
    for the view `attention`, else a part of one.
    """

    name: str  # of the model
    view: str
    data: dict[str, Any]
    html: str
    text: str

    def __repr__(self) -> str:
        """Return the view and the model."""
        return f"<{self.view} of {self.name}, {len(self.html.encode()):,} bytes of HTML>"

    def __str__(self) -> str:
        """Return the tables of the command line; for `attention`, only the number of heads."""
        return self.text

    def _repr_html_(self) -> str:
        """Return the HTML; a document is in a frame that may run scripts, but cannot reach the
        notebook."""
        if self.view != View.attention:
            return self.html
        return (
            f'<iframe srcdoc="{escape(self.html)}" title="Attention of {escape(self.name)}"'
            f' sandbox="allow-scripts" style="width: 100%; height: {_HEIGHT}px; border: 0">'
            "</iframe>"
        )


def inspect_view(
    inspector: Inspector, view: View, options: ViewOptions, output: ViewOutput | None = None
) -> Inspection:
    """Return a view, from `output` if it is computed already; the view `attention` is the page of
    the selected heads, by default all.

    Raises UsageError for options without effect on the view, and as `Inspector` does.
    """
    is_page = view is View.attention
    options.check_used([View.attention, View.heads] if is_page else [view], on_page=is_page)
    data: dict[str, Any] = {}
    if inspector.ids:
        data = {"ids": inspector.ids, "text": inspector.tokens}
    name = inspector.bundle.path.name
    if is_page:
        if unused := sorted(set(options.given) - _PAGE_OPTIONS):
            flag = f"--{unused[0].replace('_', '-')}"
            raise UsageError(f"{flag}: no effect on the page of all heads", f"remove {flag}")
        page = attention_page(inspector, options)
        text = f"attention weights of heads: {len(page.attention)}; a notebook shows the page"
        data |= {view.value: _data(page.attention)}
        return Inspection(name, view.value, data, page.html, text)
    output = output or VIEWS[view](inspector, options, no_progress)
    data |= {view.value: _data(output.report)}
    if view in MATRIX_VIEWS:
        html = "\n".join(_picture(svg(one)) for one in output.maps())
    else:
        html = _export(output, Screen(_WIDTH)).export_html(inline_styles=True, code_format=_BLOCK)
    plain = Screen(_WIDTH, is_terminal=False, has_color=False)
    text = printable(_export(output, plain).export_text()).rstrip()
    text = "\n".join(line.rstrip() for line in text.splitlines())
    return Inspection(name, view.value, data, html, text)


def _data(report: object) -> object:
    """Return a report as dicts and lists; arrays and bytes stay."""
    if isinstance(report, list):
        return [_data(one) for one in report]
    return asdict(report) if is_dataclass(report) and not isinstance(report, type) else report


def _export(output: ViewOutput, screen: Screen) -> Console:
    """Return a console that recorded the drawn view."""
    console = Console(
        file=io.StringIO(),
        record=True,
        width=screen.width,
        force_terminal=True,
        color_system="truecolor",
        legacy_windows=False,
        highlight=False,
        markup=False,
        emoji=False,
    )
    console.print(*output.draw(screen), sep="\n")
    return console


def _picture(source: str) -> str:
    encoded = base64.b64encode(source.encode()).decode()
    return f'<img src="data:image/svg+xml;base64,{encoded}" style="max-width: 100%">'
