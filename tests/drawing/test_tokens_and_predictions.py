"""Tables, JSON and CSV of tokens are safe for hostile tokens."""

import base64
import csv
import io
import json

import numpy as np
import pytest

from support.tokens import HOSTILE, printed
from tgen.cli.output_options import csv_text
from tgen.drawing.tables import attribution_table, lens_table, prediction_table, token_table
from tgen.drawing.terminal_text import label
from tgen.drawing.views import field_rows
from tgen.reports.inspection import (
    AttributionReport,
    Contribution,
    LensReport,
    Prediction,
    TextReport,
    TokenContribution,
    TokenReport,
)
from tgen.reports.json_text import json_value

N = len(HOSTILE)
CANDIDATES = [Prediction(id=i, text=t, probability=0.1, logit=1) for i, t in enumerate(HOSTILE)]


def hostile_text():
    tokens = [
        TokenReport(
            index=i, id=i, text=token, byte_offset=0, surprisal=1.5, rank=2, top_id=1,
            top_text=token, top_probability=0.5,
        )
        for i, token in enumerate(HOSTILE)
    ]  # fmt: skip
    return TextReport(
        tokens=tokens, n_bytes=9, nats_per_token=1.0, perplexity=2.7, bits_per_byte=None
    )


def hostile_lens():
    return LensReport(
        layers=["embedding"],
        first=0,
        top_ids=[list(range(N))],
        top_texts=[HOSTILE],
        top_probabilities=np.full((1, N), 0.5, np.float32),
        query=0,
        candidates=[CANDIDATES],
        answer=0,
        answer_text=HOSTILE[0],
        answer_ranks=[0],
        answer_probabilities=[0.5],
    )


def attribution_to(token):
    return AttributionReport(
        query=0,
        targets=[1],
        target_text=token,
        log_probability=-0.5,
        logit=1.0,
        contributions=[Contribution(component="layer 0, head 1", layer=0, head=1, logit=1.0)],
        tokens=[
            TokenContribution(
                position=0,
                id=1,
                text=token,
                logit=1.0,
                logit_without=0.5,
                log_probability_without=-1.0,
            )
        ],
        embedding=0.0,
        feed_forward=0.0,
        biases=0.0,
        difference=0.0,
        normalizes_outputs=False,
    )


@pytest.mark.parametrize("token", HOSTILE)
def test_hostile_tokens_are_labels_in_tables(token):
    lines = [
        *token_table(hostile_text(), rows=range(N), width=160, has_color=False),
        prediction_table(CANDIDATES, context=label(token), width=160),
        *lens_table(hostile_lens(), HOSTILE, width=160),
        *attribution_table(attribution_to(token), token, top=3, width=160),
    ]
    shown = printed(lines, width=160)
    assert not {"\x1b", "\u202e", "\u2028", "\0"} & set(shown)
    assert label(token, width=10) in shown


def test_hostile_tokens_are_labels_in_csv():
    rows = csv_text(field_rows(TokenReport, hostile_text().tokens))
    for row, token in zip(csv.DictReader(io.StringIO(rows)), HOSTILE, strict=True):
        assert row["text"] == label(token)


def test_json_restores_hostile_tokens():
    record = json.loads(json.dumps(json_value(hostile_text()), allow_nan=False))
    for shown, token in zip(record["tokens"], HOSTILE, strict=True):
        is_text = token != b"\xe6\x97"
        assert ("bytes" in shown) != is_text
        assert (shown["text"].encode() if is_text else base64.b64decode(shown["bytes"])) == token
