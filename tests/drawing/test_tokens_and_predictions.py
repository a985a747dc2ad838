"""Tables, JSON and CSV of tokens are safe for hostile tokens."""

import csv
import io
import json

import numpy as np

from support.tokens import HOSTILE, printed
from tgen.cli.inspect.output import csv_text
from tgen.cli.inspect.views import field_rows
from tgen.drawing.tables import attribution_table, lens_table, prediction_table, token_table
from tgen.drawing.terminal_text import label
from tgen.reports.inspection import (
    AttributionReport,
    Contribution,
    LensReport,
    Prediction,
    TextReport,
    TokenReport,
)
from tgen.reports.json_text import json_value

N = len(HOSTILE)


def test_hostile_tokens_are_shown_as_labels_everywhere():
    tokens = [
        TokenReport(
            index=i, id=i, text=token, byte_offset=0, surprisal=1.5, rank=2, top_id=1,
            top_text=token, top_probability=0.5,
        )
        for i, token in enumerate(HOSTILE)
    ]  # fmt: skip
    text = TextReport(
        tokens=tokens, n_bytes=9, nats_per_token=1.0, perplexity=2.7, bits_per_byte=None
    )
    candidates = [Prediction(id=i, text=t, probability=0.1, logit=1) for i, t in enumerate(HOSTILE)]
    lens = LensReport(
        layers=["embedding"],
        first=0,
        top_ids=[list(range(N))],
        top_texts=[HOSTILE],
        top_probabilities=np.full((1, N), 0.5, np.float32),
        query=0,
        candidates=[candidates],
        answer=0,
        answer_text=HOSTILE[0],
        answer_ranks=[0],
        answer_probabilities=[0.5],
    )
    for token in HOSTILE:
        parts = [Contribution(component="layer 0, head 1", layer=0, head=1, logit=1.0)]
        attribution = AttributionReport(
            query=0,
            target=1,
            target_text=token,
            probability=0.5,
            logit=1.0,
            contributions=parts,
            difference=0.0,
            normalizes_outputs=False,
        )
        lines = [
            *token_table(text, rows=range(N), width=160, has_color=False),
            prediction_table(candidates, context=label(token), width=160),
            *lens_table(lens, HOSTILE, width=160),
            *attribution_table(attribution, token, top=3, width=160),
        ]
        shown = printed(lines, width=160)
        assert not {"\x1b", "\u202e", "\u2028", "\0"} & set(shown)
        assert label(token, width=10) in shown
    record = json.loads(json.dumps(json_value(text), allow_nan=False))
    rows = list(csv.reader(io.StringIO(csv_text(field_rows(TokenReport, text.tokens)))))
    for i, token in enumerate(HOSTILE):
        assert rows[i + 1][2] == label(token)
        if i != 6:
            assert record["tokens"][i]["text"].encode() == token
    assert record["tokens"][6]["bytes"] == "5pc="
