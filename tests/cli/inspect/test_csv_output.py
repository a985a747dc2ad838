"""`--csv` keeps every number and label."""

import csv
import io

import numpy as np

from support.tokens import attention_report, random_weights
from tgen.cli.output_options import csv_text
from tgen.drawing.views import weight_rows


def test_csv_restores_every_weight_exactly():
    weights = random_weights(30)
    text = csv_text(weight_rows([attention_report(weights)], range(30), [b"x"] * 30))
    for row in csv.DictReader(io.StringIO(text)):
        assert np.float32(row["weight"]) == weights[int(row["query"]), int(row["key"])]
