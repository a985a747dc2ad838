"""One text through one model: every report that can be made of it."""

from collections.abc import Callable, Sequence
from functools import cached_property

from tgen.checkpoint.directory import ModelBundle
from tgen.errors import UsageError
from tgen.introspect.ablation import Ablate, ablate_heads
from tgen.introspect.attention import (
    Measure,
    attention_of,
    check_length,
    rollout,
    telling_head,
    worse,
)
from tgen.introspect.heads import heads_of
from tgen.introspect.lens import lens_of
from tgen.introspect.positions import positions_of
from tgen.introspect.predictions import next_tokens, text_of
from tgen.introspect.selection import index
from tgen.introspect.summary import summarise
from tgen.introspect.verify import footer_checks, verify
from tgen.introspect.why import why_of
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


class Look:
    """A model with a text. Layers, heads and positions count from 0, negative ones from the end."""

    def __init__(
        self, bundle: ModelBundle, text: bytes | None, *, device: str = "auto", tail: bool = False
    ) -> None:
        """`tail` takes the last context_length tokens of a longer text. Without a text there are
        only the reports of the model itself.

        Raises UsageError if the text is empty or too long.
        """
        self.bundle, self.tokenizer, self.config = bundle, bundle.tokenizer, bundle.config
        self.summary: ModelSummary = summarise(bundle)
        ids = self.tokenizer.encode(text or b"")
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

    def telling_head(self, layers: Sequence[int]) -> Place:
        """The head of these layers that looks most at one other token."""
        return telling_head(self.model, self.ids, layers)

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
        """Every head's metrics; with `ablate` also what the text costs more without each."""
        ablation = ablate_heads(self.model, self.ids, ablate, progress=progress) if ablate else None
        end = self.tokenizer.end_of_text
        candidates = [i for i in range(self.tokenizer.vocab_size) if self.tokenizer.token_bytes(i)]
        report, recorder = heads_of(
            self.model,
            self.ids,
            candidates=candidates,
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
        query = self.position(query)
        return next_tokens(self.model, self.tokenizer, self.ids, query=query, top=top)

    def lens(self, *, query: int = -1, first: int = 0, last: int = -1, top: int = 5) -> LensReport:
        """The logit lens; refused where norms stand after the addition."""
        return lens_of(
            self.model,
            self.tokenizer,
            self.ids,
            query=self.position(query),
            first=self.position(first),
            last=self.position(last),
            top=top,
        )

    def why(self, *, query: int = -1, target: bytes | None = None) -> WhyReport:
        """A logit taken apart: the likeliest token's, or that of the first token of `target`."""
        wanted = None
        if target is not None:
            ids = self.tokenizer.encode(target)
            if not ids:
                raise UsageError("--target is empty", "give the text of a token")
            wanted = ids[0]
        query = self.position(query)
        return why_of(self.model, self.tokenizer, self.ids, query=query, target=wanted)

    def verify(self) -> list[Check]:
        """Everything that must hold for this to be what the model does."""
        found = verify(self.model, self.tokenizer, self.ids)
        self._remember(found)
        return found

    def position(self, i: int) -> int:
        """A token's number; raises UsageError if there is none."""
        return index("--query", i, len(self.ids))

    def _remember(self, checks: Sequence[Check]) -> None:
        for check in checks:
            before = self._checks.get(check.name)
            if before is None or worse(before.value, check.value) != before.value:
                self._checks[check.name] = check
