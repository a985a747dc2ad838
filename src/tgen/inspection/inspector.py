"""One text through one model: every report that can be made of it."""

from collections.abc import Callable, Sequence
from functools import cached_property

import torch

from tgen.checkpoint.model_dir import ModelBundle
from tgen.errors import UsageError
from tgen.inspection.ablation import Ablate, ablate_heads
from tgen.inspection.attention import (
    AttentionRecorder,
    Measure,
    attention_of,
    batch_of,
    check_length,
    most_focused_head,
    rollout,
    worse,
)
from tgen.inspection.heads import heads_of
from tgen.inspection.logit_attribution import why_of
from tgen.inspection.logit_lens import lens_of
from tgen.inspection.model_summary import summarize
from tgen.inspection.positions import positions_of
from tgen.inspection.predictions import next_tokens, text_of
from tgen.inspection.verify import footer_checks, verify
from tgen.model.device import choose_device
from tgen.model.transformer import Transformer
from tgen.reports import (
    AttentionReport,
    Check,
    HeadsReport,
    LensReport,
    ModelSummary,
    PositionsReport,
    Prediction,
    RolloutReport,
    TextReport,
    WhyReport,
)

Place = tuple[int, int | None]  # a layer and a head; None: the mean over its heads
_ENOUGH = 16  # different tokens of a text, for random text to be made of them


class Inspector:
    """A model with a text. Positions count from 0, negative ones from the end."""

    def __init__(
        self,
        bundle: ModelBundle,
        text: bytes | None,
        *,
        device: str = "auto",
        tail: bool = False,
        found_by: str = "",
    ) -> None:
        """`tail` takes the last context_length tokens of a longer text. Without a text there are
        only the reports of the model itself; they say by which rule it was found.

        Raises UsageError if the text is empty or too long.
        """
        self.bundle, self.tokenizer, self.config = bundle, bundle.tokenizer, bundle.config
        self.summary: ModelSummary = summarize(bundle, found_by)
        ids = self.tokenizer.encode_prompt(text) if text else []
        # Tokens before those that are looked at.
        self.n_left_out = max(0, len(ids) - self.config.context_length) if tail else 0
        self.ids: list[int] = ids[self.n_left_out :]
        if text is not None:
            check_length(len(self.ids), self.config.context_length)
        self._device = device
        self._checks: dict[str, Check] = {}

    @cached_property
    def model(self) -> Transformer:
        """In float32."""
        model = Transformer.from_arrays(self.config, self.bundle.arrays)
        return model.to(choose_device(self._device))

    @property
    def checks(self) -> list[Check]:
        """Of all that was computed so far, each at its worst."""
        return list(self._checks.values())

    @property
    def tokens(self) -> list[bytes]:
        """The text's tokens as bytes."""
        return [self.tokenizer.token_bytes(i) for i in self.ids]

    def most_focused_head(self, layers: Sequence[int]) -> Place:
        """The head of these layers that looks most at one other token."""
        return most_focused_head(self.model, self.ids, layers)

    def attention(
        self, places: Sequence[Place], *, measure: Measure = "attention", why: str = ""
    ) -> list[AttentionReport]:
        """Weights (T, T) of these places."""
        reports, recorder = attention_of(self.model, self.ids, places, measure=measure, why=why)
        self._remember(footer_checks(recorder))
        return reports

    def rollout(self) -> list[RolloutReport]:
        """A matrix a layer."""
        reports, recorder = rollout(self.model, self.ids)
        self._remember(footer_checks(recorder))
        return reports

    def heads(
        self, *, ablate: Ablate | None = None, progress: Callable[[float], None] = lambda _: None
    ) -> HeadsReport:
        """Every head's metrics; with `ablate` also what the text costs more without each.

        Raises UsageError for a text of one token, in which there is nothing to choose.
        """
        if len(self.ids) < 2:
            raise UsageError("heads need a text of at least 2 tokens", "give a longer --prompt")
        ablation = ablate_heads(self.model, self.ids, ablate, progress=progress) if ablate else None
        end = self.tokenizer.end_of_text
        candidates = sorted({i for i in self.ids if i != end})
        drawn_from = f"this text's {len(candidates)}"
        if len(candidates) < _ENOUGH:  # a vocabulary may have tokens that were never trained
            size = self.tokenizer.vocab_size
            candidates = [i for i in range(size) if self.tokenizer.token_bytes(i)]
            drawn_from = f"all {len(candidates):,}, since this text has few different ones"
        report, recorder = heads_of(
            self.model,
            self.ids,
            candidates=candidates,
            drawn_from=drawn_from,
            start=[] if end is None else [end],
            ablation=ablation,
        )
        self._remember(footer_checks(recorder))
        return report

    @cached_property
    def text(self) -> TextReport:
        """The tokens and their surprisal."""
        return text_of(self.model, self.tokenizer, self.ids)

    def positions(self) -> list[PositionsReport]:
        """The encoding of positions."""
        return positions_of(self.model)

    def predictions(self, *, query: int = -1, top: int = 10) -> list[Prediction]:
        """What comes after the token at `query`."""
        query = self._position(query)
        return next_tokens(self.model, self.tokenizer, self.ids, query=query, top=top)

    def lens(self, *, query: int = -1, first: int = 0, last: int = -1, top: int = 5) -> LensReport:
        """The logit lens; refused where norms stand after the addition."""
        return lens_of(
            self.model,
            self.tokenizer,
            self.ids,
            query=self._position(query),
            first=self._position(first),
            last=self._position(last),
            top=top,
        )

    def why(self, *, query: int = -1, target: bytes | None = None) -> WhyReport:
        """A logit taken apart: the likeliest token's, or that of `target`.

        Raises UsageError unless `target` is one token.
        """
        wanted = None if target is None else self._one_token(target)
        query = self._position(query)
        return why_of(self.model, self.tokenizer, self.ids, query=query, target=wanted)

    def verify(self) -> list[Check]:
        """Everything that must hold for this to be what the model does."""
        found = verify(self.model, self.tokenizer, self.ids)
        self._remember(found)
        return found

    def confirm(self) -> None:
        """Checks the weights of every layer over the text, if nothing has done so yet."""
        if self.ids and not self._checks:
            recorder = AttentionRecorder(lambda *_: None)
            with torch.no_grad():
                self.model.hidden(batch_of(self.model, [self.ids]), recorder=recorder)
            self._remember(footer_checks(recorder))

    def _position(self, i: int) -> int:
        if not -len(self.ids) <= i < len(self.ids):
            raise UsageError(
                f"there is no token {i}", f"the text has {len(self.ids)}, counted from 0"
            )
        return i % len(self.ids)

    def _one_token(self, text: bytes) -> int:
        ids = self.tokenizer.encode(text, continues=True)
        if len(ids) != 1:
            pieces = b" | ".join(map(self.tokenizer.token_bytes, ids)).decode(errors="replace")
            raise UsageError(
                f"--target is {len(ids)} tokens: {pieces}" if ids else "--target is empty",
                "give the text of one token; most words begin with their space: --target ' the'",
            )
        return ids[0]

    def _remember(self, checks: Sequence[Check]) -> None:
        for check in checks:
            before = self._checks.get(check.name)
            if before is None or worse(before.value, check.value) != before.value:
                self._checks[check.name] = check
