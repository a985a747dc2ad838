"""All that a run is made of, from its text to its model."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from numpy.typing import NDArray

from tgen import corpus
from tgen.config import Parallel
from tgen.corpus import TokenDataset
from tgen.model.device import Device
from tgen.reports import ScalingReport
from tgen.runs.run_record import RunRecord
from tgen.storage.disk_array import Array
from tgen.tokenizer import Tokenizer
from tgen.training.plan.model_size import matmul_params
from tgen.training.state import TrainState, new_state

_TABLES_SHARE = 1 / 40  # of the weights' bytes: n-grams stay small beside them


@dataclass(frozen=True)
class PreparedRun:
    """All that a run is made of."""

    record: RunRecord
    tokenizer: Tokenizer
    tokens: Mapping[str, Array]  # the fields of a TokenStore
    device: Device
    weights: Mapping[str, NDArray[Any]] | None = None  # that it fine-tunes
    parallel: Parallel | None = None  # how ranks share the model; None: there is one
    scaling: ScalingReport | None = None  # of a dry run that asks for it

    def new_state(self) -> TrainState:
        """A run at its start."""
        plan = self.record.plan
        state = new_state(
            plan.model, plan.train, self.device, weights=self.weights, parallel=self.parallel
        )
        state.progress.closing_seconds = plan.closing_seconds
        return state

    @cached_property
    def ngrams(self) -> Mapping[str, NDArray[Any]]:
        """What usually follows in the text, where the model is to come with it."""
        if not self.record.ngrams:
            return {}
        most_bytes = round(_TABLES_SHARE * 4 * matmul_params(self.record.plan.model))
        return corpus.ngram_tables(self.tokens["train"], most_bytes=most_bytes)

    def store(self) -> TokenDataset:
        """The tokens as batches."""
        plan = self.record.plan
        return TokenDataset(
            **self.tokens,
            end_of_text=self.tokenizer.end_of_text,
            merge_pairs=self.tokenizer.merge_pairs if plan.train.token_split > 0 else None,
            held_out_bytes=self.record.held_out_bytes,
            context_length=plan.context_length,
            batch_size=plan.train.batch_size,
            seed=plan.train.seed,
        )
