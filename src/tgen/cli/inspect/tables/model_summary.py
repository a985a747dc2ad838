"""What a model is made of."""

from rich.table import Table
from rich.text import Text

from tgen.cli.console import printable
from tgen.cli.render.tables import table
from tgen.reports import ModelSummary

_MIB = 2**20


def summary_view(summary: ModelSummary) -> list[Table | Text]:
    """The configuration in words, and what the parts weigh."""
    fields = summary.fields
    rows = table("part", "shape", ">parameters", "stored as")
    groups: dict[str, list[tuple[list[int], int, str]]] = {}
    for name, shape, count, stored in summary.parameters:
        parts = name.split(".")
        group = f"blocks · {'.'.join(parts[2:])}" if parts[0] == "blocks" else name
        groups.setdefault(group, []).append((shape, count, stored))
    for group, tensors in groups.items():
        size = " x ".join(map(str, tensors[0][0]))
        times = f"{len(tensors)} of " if len(tensors) > 1 else ""
        kinds = ", ".join(sorted({stored for _, _, stored in tensors}))
        rows.add_row(group, times + size, f"{sum(n for _, n, _ in tensors):,}", kinds)
    if fields["tied_embeddings"]:
        rows.add_row("lm_head", "tied to token_embedding", "0", "")
    rows.add_row("all", "", f"{summary.n_parameters:,}", "", style="bold")
    found = f" ({summary.found_by})" if summary.found_by else ""
    n = fields["sliding_window"]
    window = f", each token sees the last {n:,}" if n else ""
    words = (
        f"{printable(summary.path)}{found}\n"
        f"{summary.family}: {fields['n_layers']} layers, {fields['n_heads']} heads "
        f"({fields['n_kv_heads']} of keys), {fields['d_model']} wide, vocabulary "
        f"{fields['vocab_size']:,}, context {fields['context_length']:,}\n"
        f"{fields['position']} positions, {fields['norm']} "
        f"{'after' if fields['post_norm'] else 'before'} each part, {fields['activation']}"
        f", {fields['d_ff']} wide in the feed-forward{window}\n"
        f"{summary.weight_bytes / _MIB:.1f} MiB of weights, "
        f"{summary.cache_bytes_per_token:,} bytes of KV cache a token, "
        f"{summary.attention_bytes / _MIB:.1f} MiB for a layer's attention weights over a whole "
        "context, were they ever all held"
    )
    return [Text(words), Text(), rows]
