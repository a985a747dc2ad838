"""The position encoding of a model as a matrix."""

from typing import Any

import torch

from tgen.config import Rope
from tgen.config.index_ranges import name_layers
from tgen.errors import UsageError
from tgen.model.rope import rotary_tables, sinusoid
from tgen.model.transformer import Transformer
from tgen.reports.inspection import PositionsReport

_MAX_POSITIONS = 4096  # rows of a matrix; the similarities have as many columns


@torch.no_grad()
def position_encoding(model: Transformer) -> list[PositionsReport]:
    """Return one matrix; for learned positions two: the cosine similarities and the vectors; for
    rotary positions one per set of frequencies. Raises UsageError if no layer has positions.
    """
    config = model.config
    n = min(config.context_length, _MAX_POSITIONS)
    limit = f", the first {n:,} positions" if n < config.context_length else ""

    def report(kind: Any, title: str, values: Any, row: str, column: str) -> PositionsReport:
        n_rows, n_columns = values.shape
        return PositionsReport(
            kind=kind,
            title=title + limit,
            values=values,
            row_name=row,
            column_name=column,
            rows=[str(i) for i in range(n_rows)],
            columns=[str(i) for i in range(n_columns)],
        )

    if config.position == "sinusoidal":
        title = "sinusoidal positions: sin and cos of position / 10000^(2i / d), interleaved"
        values = sinusoid(n, config.d_model)
        return [report("sinusoidal", title, values, "position", "dimension")]
    if config.position == "rotary":
        kinds: dict[Rope, str] = {"global": "rotary", "local": "rotary_local"}
        reports = []
        for rope, kind in kinds.items():
            layers = [layer for layer in range(config.n_layers) if config.rope(layer) == rope]
            if layers:
                title = "rotary positions: cos(distance x frequency) of each pair of dimensions"
                if config.n_rotated < config.head_dim:
                    title += f" ({config.n_rotated} of {config.head_dim} dimensions are rotated)"
                if len(layers) < config.n_layers:
                    title += f" in {name_layers(layers)}"
                cos, _ = rotary_tables(config, n, rope)
                cosines = cos / cos[0]  # without the factor of some kinds of RoPE scaling
                reports.append(report(kind, title, cosines, "distance", "pair"))
        if not reports:
            raise UsageError(
                "--view positions: not available; no layer of this model has a position encoding",
                "use another view",
            )
        return reports
    vectors = model.position_embedding.weight[:n].float().cpu()
    unit = torch.nn.functional.normalize(vectors, dim=-1)
    title = "learned positions: cosine similarity"
    return [
        report("similarity", title, (unit @ unit.T).numpy(), "position", "position"),
        report("learned", "learned positions: vectors", vectors.numpy(), "position", "dimension"),
    ]
