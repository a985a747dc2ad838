"""How a model tells positions apart: its encoding as a matrix."""

import torch

from tgen.model.rope import rotary_tables, sinusoid
from tgen.model.transformer import Transformer
from tgen.reports import PositionsReport


@torch.no_grad()
def positions_of(model: Transformer) -> list[PositionsReport]:
    """One matrix, or two for learned positions: the table, and how alike they are."""
    config = model.config
    T, C = config.context_length, config.d_model
    numbers = [str(i) for i in range(max(T, C))]
    if config.position == "sinusoidal":
        return [
            PositionsReport(
                kind="sinusoidal",
                title="sin and cos (position / 10000^(2i / d)), side by side",
                values=sinusoid(T, C),
                row_name="position",
                column_name="dimension",
                rows=numbers[:T],
                columns=numbers[:C],
            )
        ]
    if config.position == "rotary":
        cos, _ = rotary_tables(config)
        return [
            PositionsReport(
                kind="rotary",
                title="cos(distance x angle): how a pair of dimensions turns from query to key",
                values=cos,
                row_name="distance",
                column_name="pair",
                rows=numbers[:T],
                columns=numbers[: cos.shape[1]],
            )
        ]
    table = model.position_embedding.weight.float().cpu()
    unit = torch.nn.functional.normalize(table, dim=-1)
    return [
        PositionsReport(
            kind="similarity",
            title="learned positions: the cosine between each two",
            values=(unit @ unit.T).numpy(),
            row_name="position",
            column_name="position",
            rows=numbers[:T],
            columns=numbers[:T],
        ),
        PositionsReport(
            kind="learned",
            title="learned positions: their vectors",
            values=table.numpy(),
            row_name="position",
            column_name="dimension",
            rows=numbers[:T],
            columns=numbers[:C],
        ),
    ]
