"""Tables of the model's configuration and parameters, and of the self-checks."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from tgen.cli.render.tables import table
from tgen.inspection.layer_names import name_layers
from tgen.reports.inspection import Check, ModelSummary

_MIB = 2**20
_PLACEMENTS = {
    "pre": "before each sublayer (pre-norm)",
    "post": "after each residual addition (post-norm)",
    "parallel": "before attention and feed-forward, which run in parallel",
    "output": "on each sublayer's output",
    "sandwich": "before each sublayer and on its output",
}
_SCALES = {
    "embedding {:.6g}": ("embedding_scale", 1),
    "attention {:.6g}": ("attention_scale", None),
    "residual {:.6g}": ("residual_scale", 1),
    "logits 1/{:.6g}": ("logits_divisor", 1),
}


def summary_table(summary: ModelSummary) -> list[Table | Text]:
    """Return the configuration as text, and a table of the parameters."""
    config = summary.config
    rows = table("parameter", "shape", ">count", "dtype")
    groups: dict[str, list[tuple[list[int], int, str]]] = {}  # one per name inside the blocks
    for name, shape, n, dtype in summary.parameters:
        parts = name.split(".")
        group = f"blocks · {'.'.join(parts[2:])}" if parts[0] == "blocks" else name
        groups.setdefault(group, []).append((shape, n, dtype))
    for group, tensors in groups.items():
        size = " x ".join(map(str, tensors[0][0]))
        times = f"{len(tensors)} of " if len(tensors) > 1 else ""
        dtypes = ", ".join(sorted({dtype for _, _, dtype in tensors}))
        rows.add_row(group, times + size, f"{sum(n for _, n, _ in tensors):,}", dtypes)
    if config["tied_embeddings"]:
        rows.add_row("lm_head", "tied to token_embedding", "0", "")
    rows.add_row("total", "", f"{summary.n_parameters:,}", "", style="bold")
    rule = f" ({summary.found_by})" if summary.found_by else ""
    text = (
        f"{summary.path}{rule}\n"
        f"{summary.family}: layers {config['n_layers']}, heads {config['n_heads']} "
        f"(key/value heads {config['n_kv_heads']}), d_model {config['d_model']}, "
        f"d_ff {config['d_ff']}, vocabulary {config['vocab_size']:,}, "
        f"context {config['context_length']:,}\n"
        f"{'; '.join(_architecture(config))}\n"
        f"{summary.weight_bytes / _MIB:.1f} MiB of weights, {summary.cache_bytes_per_token:,} "
        "bytes of KV cache per token, "
        f"{summary.attention_bytes / _MIB:.1f} MiB for one layer's attention weights over a full "
        "context (computed only for inspection)"
    )
    return [Text(text), Text(), rows]


def _architecture(config: dict[str, Any]) -> list[str]:
    """Return the choices that a family or its configuration makes, one phrase per subject."""
    norm = f"{config['norm']} {_PLACEMENTS[config['norm_placement']]}"
    norm += " (multiplies by 1 + weight)" * config["norm_adds_one"]
    phrases = [_positions(config), norm, config["activation"]]
    if config["qk_norm"]:
        over = " over all heads" * config["qk_norm_over_heads"]
        phrases.append(f"query and key norm{over}")
    if window := config["sliding_window"]:
        phrases.append(f"sliding window of {window:,} tokens{_where(config['sliding_layers'])}")
    scales = [
        name.format(config[field])
        for name, (field, default) in _SCALES.items()
        if config[field] != default
    ]
    return [*phrases, f"scale factors: {', '.join(scales)}"] if scales else phrases


def _positions(config: dict[str, Any]) -> str:
    """Return the position encoding; for RoPE its base, scaling, dimensions and layers."""
    if config["position"] != "rotary":
        return f"{config['position']} positions"
    details = [f"base {config['rope_theta']:,.10g}"]
    if config["local_rope_theta"] is not None:
        details.append(f"{config['local_rope_theta']:,.10g} in layers with a sliding window")
    if config["rope_scaling"]:
        details.append(f"{config['rope_scaling']['kind']} scaling")
    if config["rotary_dim"] not in (None, config["head_dim"]):
        details.append(f"{config['rotary_dim']} of {config['head_dim']} dimensions")
    return f"rotary positions ({', '.join(details)}){_where(config['rope_layers'])}"


def _where(layers: Sequence[bool] | None) -> str:
    """Return the layers that have a property, or nothing if all do."""
    if layers is None or all(layers):
        return ""
    chosen = [i for i, has in enumerate(layers) if has]
    return f" in {name_layers(chosen)}" if chosen else " in no layer"


def checks_table(checks: Sequence[Check]) -> list[Table | Text]:
    """Return one row per check, and the verdict."""
    rows = table("check", ">error", ">limit", "")
    for check in checks:
        verdict = Text("passed") if check.passed else Text("FAILED", style="bold red")
        rows.add_row(check.name, f"{check.value:.1e}", f"{check.limit:.0e}", verdict)
    n = sum(not check.passed for check in checks)
    return [rows, Text(f"{n} of {len(checks)} checks failed" if n else "all checks passed")]


def checks_footer(checks: Sequence[Check]) -> Text:
    """Return the line that ends every view of a text."""
    failed = [f"{check.name}: error {check.value:.0e}" for check in checks if not check.passed]
    if failed:
        text = f"SELF-CHECK FAILED: {'; '.join(failed)}; see --view verify"
        return Text(text, style="bold red")
    names = "; ".join(f"{check.name} (error {check.value:.0e})" for check in checks)
    return Text(f"self-check passed: {names}", style="dim")
