"""The attention page of one text: its reports, the document, and its form in a notebook."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from html import escape

from tgen.cli.inspect.heatmap.heatmap import AUTO_SELECTED, attention_map
from tgen.cli.inspect.heatmap.svg import svg
from tgen.cli.inspect.page.render import packed_bytes, render_page
from tgen.cli.render import Scale
from tgen.errors import UsageError
from tgen.inspection.ablation import AblationKind
from tgen.inspection.attention import Measure
from tgen.inspection.inspector import Inspector

_MAX_PAGE_BYTES = 24 * 10**6  # bytes of weights: a browser opens the page without delay
_HEIGHT = 860  # pixels of the frame in a notebook


@dataclass(frozen=True, repr=False)
class AttentionPage:
    """The page of `tgen inspect --html`, which notebooks show. `html` is the whole document."""

    name: str  # of the model
    html: str

    def __repr__(self) -> str:
        return f"<attention page of {self.name}, {len(self.html.encode()):,} bytes of HTML>"

    def _repr_html_(self) -> str:
        """Return the page in a frame that may run scripts, but cannot reach the notebook."""
        return (
            f'<iframe srcdoc="{escape(self.html)}" title="Attention of {escape(self.name)}"'
            f' sandbox="allow-scripts" style="width: 100%; height: {_HEIGHT}px; border: 0">'
            "</iframe>"
        )


def attention_page(
    inspector: Inspector,
    *,
    layer: str | None,
    head: str | None,
    measure: Measure,
    ablate: AblationKind | None,
    scale: Scale = "sqrt",
    progress: Callable[[float], None] = lambda _: None,
) -> str:
    """Return the page of the selected heads (by default all) as an HTML document.

    Raises UsageError if its weights would be too large for a browser, and as
    `Inspector.select_heads` does.
    """
    selected = inspector.select_heads(layer, head, default="all")
    size = packed_bytes(len(selected), len(inspector.ids))
    if size > _MAX_PAGE_BYTES:
        raise UsageError(
            f"the page would have {size / 1e6:,.0f} MB of attention weights "
            f"(limit {_MAX_PAGE_BYTES / 1e6:.0f} MB)",
            "select fewer layers and heads, or shorten the text",
        )
    heads = None
    if len(inspector.ids) > 1 and head != "mean":
        heads = inspector.heads(ablate=ablate, progress=progress, selected=selected)
    focused = inspector.most_focused_head(sorted({layer for layer, _ in selected}))
    start = focused if focused in selected else selected[0]  # what the page shows first
    attention = [
        replace(one, selection=AUTO_SELECTED) if (one.layer, one.head) == start == focused else one
        for one in inspector.attention(selected, measure=measure)
    ]
    picture = attention_map(attention[selected.index(start)], inspector.tokens, scale=scale)
    return render_page(
        name=inspector.bundle.path.name,
        summary=inspector.summary,
        text=inspector.text,
        attention=attention,
        heads=heads,
        lens=None if inspector.config.post_norm else inspector.logit_lens(),
        checks=inspector.checks,
        picture=svg(picture),
    )
