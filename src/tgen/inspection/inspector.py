"""The entry point of inspection: one model, one text, every report."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tgen.checkpoint.hf import generation_config
from tgen.checkpoint.model_dir import ModelBundle
from tgen.config.index_ranges import PARTS, PATCHED_PARTS, parse_indices, parse_parts
from tgen.errors import UsageError
from tgen.inspection.ablation import AblationKind, ablate_groups, ablate_heads, parse_groups
from tgen.inspection.activations import Activations, activation_bytes, record_activations
from tgen.inspection.attention import (
    AttentionRecorder,
    LayerHead,
    Measure,
    attention_rollout,
    larger_error,
    most_focused_head,
    record_attention,
)
from tgen.inspection.heads import measure_heads
from tgen.inspection.hooks import iterate_logits, token_batch
from tgen.inspection.logit_attribution import attribute_logit
from tgen.inspection.logit_lens import logit_lens
from tgen.inspection.model_summary import summarize
from tgen.inspection.patching import patch_activations
from tgen.inspection.position_encoding import position_encoding
from tgen.inspection.predictions import score_text, top_predictions
from tgen.inspection.verify import basic_checks, verify
from tgen.machine.device import choose_device, set_threads
from tgen.machine.memory import check_ram
from tgen.model.transformer import Transformer
from tgen.reports.inspection import (
    AblationReport,
    AttentionReport,
    AttributionReport,
    Check,
    HeadsReport,
    LensReport,
    ModelSummary,
    PatchReport,
    PositionsReport,
    Prediction,
    RolloutReport,
    TextReport,
)
from tgen.reports.number_format import count

_MIN_DISTINCT_TOKENS = 16  # in a text, for random text to be sampled from its tokens


class Inspector:
    """A model with a text. Positions count from 0; negative ones count from the end."""

    def __init__(
        self,
        bundle: ModelBundle,
        text: bytes | None,
        *,
        device: str = "auto",
        tail: bool = False,
        found_by: str = "",
    ) -> None:
        """Tokenize the text; `tail` keeps the last context_length tokens of a longer one.

        Without a text only the reports of the model itself are available. `found_by` is stored
        in the model summary. Raises UsageError if the text is empty or too long.
        """
        self.bundle, self.tokenizer, self.config = bundle, bundle.tokenizer, bundle.config
        self.summary: ModelSummary = summarize(bundle, found_by)
        ids = self.tokenizer.encode_prompt(text) if text else []
        context = self.config.context_length
        self.n_skipped = max(0, len(ids) - context) if tail else 0  # tokens before `ids`
        self.ids: list[int] = ids[self.n_skipped :]
        if text is not None and not self.ids:
            raise UsageError("the prompt is empty", "pass at least one character")
        if len(self.ids) > context:
            raise UsageError(
                f"the prompt has {len(self.ids):,} tokens, but the model's context is {context:,}",
                "shorten the text, or add --tail to inspect its last tokens",
            )
        self._device = device
        self._checks: dict[str, Check] = {}

    @cached_property
    def model(self) -> Transformer:
        """The model in float32."""
        set_threads(None)
        model = Transformer.from_arrays(self.config, self.bundle.arrays)
        return model.to(choose_device(self._device))

    @property
    def checks(self) -> list[Check]:
        """The self-checks of all computations so far, each with its largest error."""
        return list(self._checks.values())

    @property
    def tokens(self) -> list[bytes]:
        """The text's tokens as bytes."""
        return [self.tokenizer.token_bytes(i) for i in self.ids]

    def select_heads(self, layer: str | None, head: str | None, *, default: str) -> list[LayerHead]:
        """Return the layers and heads of texts such as "0,2-4"; `default` replaces a missing head.

        The default "auto" selects the most focused head, or the last layer for a given head.
        Raises UsageError for texts that `parse_indices` does not accept.
        """
        layers = parse_indices("--layer", "all" if layer is None else layer, self.config.n_layers)
        if head is None and default == "auto":
            return [self.most_focused_head(layers)]
        if head == "mean":
            heads: list[int | None] = [None]
        else:
            chosen = default if head is None else head
            heads = list(parse_indices("--head", chosen, self.config.n_heads))
        if layer is None and default == "auto":
            layers = layers[-1:]
        return [(layer, head) for layer in layers for head in heads]

    def most_focused_head(self, layers: Sequence[int]) -> LayerHead:
        """Return the head of these layers with the largest weights on a single other token."""
        return most_focused_head(self.model, self.ids, layers)

    def attention(
        self, selected: Sequence[LayerHead], *, measure: Measure = "attention"
    ) -> list[AttentionReport]:
        """Return the attention weights (T, T) of the selected heads; raises ModelError if they
        do not fit into RAM."""
        self._check_ram(len(selected))
        reports, recorder = record_attention(self.model, self.ids, selected, measure=measure)
        self._add_checks(basic_checks(recorder))
        return reports

    def rollout(self) -> list[RolloutReport]:
        """Return the attention rollout, one matrix per layer; errors as in `attention`."""
        self._check_ram(self.config.n_layers + 2)
        reports, recorder = attention_rollout(self.model, self.ids)
        self._add_checks(basic_checks(recorder))
        return reports

    def heads(
        self,
        *,
        ablate: AblationKind | None = None,
        progress: Callable[[float], None] = lambda _: None,
        selected: Collection[LayerHead] | None = None,
    ) -> HeadsReport:
        """Return the metrics of the selected heads, by default all; with `ablate` also the loss
        increase without each head.

        Raises UsageError for a text of one token, whose attention is always 1.
        """
        if len(self.ids) < 2:
            raise UsageError(
                "--view heads needs a text of at least 2 tokens", "pass a longer --prompt"
            )
        ablation = ablate_heads(self.model, self.ids, ablate, progress=progress) if ablate else None
        end = self.tokenizer.end_of_text
        candidates = sorted({i for i in self.ids if i != end})
        sampled_from = f"the {len(candidates)} distinct tokens of this text"
        if len(candidates) < _MIN_DISTINCT_TOKENS:
            # The last resort: a vocabulary may contain tokens that were never trained.
            size = self.tokenizer.vocab_size
            candidates = [i for i in range(size) if self.tokenizer.token_bytes(i)]
            sampled_from = (
                f"all {len(candidates):,} tokens (the text has fewer than {_MIN_DISTINCT_TOKENS} "
                "distinct ones)"
            )
        report, recorder = measure_heads(
            self.model,
            self.ids,
            candidates=candidates,
            sampled_from=sampled_from,
            prefix=[] if end is None else [end],
            ablation=ablation,
        )
        self._add_checks(basic_checks(recorder))
        if selected is None:
            return report
        return replace(report, heads=[h for h in report.heads if (h.layer, h.head) in selected])

    @cached_property
    def text(self) -> TextReport:
        """The tokens with their surprisal."""
        return score_text(self.model, self.tokenizer, self.ids)

    def positions(self) -> list[PositionsReport]:
        """Return the position encoding."""
        return position_encoding(self.model)

    @torch.no_grad()
    def next_logits(self, query: int = -1) -> NDArray[np.float32]:
        """Return the logits (V,) of the token after position `query`."""
        x = self.model.hidden_states(token_batch(self.model, [self.ids]))[0, query]
        return self.model.logits(x).float().cpu().numpy()

    @torch.no_grad()
    def logits_backward(self) -> Iterator[NDArray[np.float32]]:
        """Yield the logits (V,) of the token after each position, from the last one on."""
        x = self.model.hidden_states(token_batch(self.model, [self.ids]))[0].flip(0)
        for _, logits in iterate_logits(self.model, x):
            yield from logits.cpu().numpy()

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """Fields of SamplingConfig that the model's generation_config.json sets."""
        return generation_config.read(self.bundle.settings_path).sampling

    def predictions(self, *, query: int = -1, top: int = 10) -> list[Prediction]:
        """Return the `top` candidates for the token after `query`."""
        logits = torch.from_numpy(self.next_logits(query))
        return top_predictions(logits, self.tokenizer, top)

    def logit_lens(
        self, *, query: int = -1, first: int = 0, last: int = -1, top: int = 5
    ) -> LensReport:
        """Return the logit lens; raises UsageError for a post-norm model."""
        positions = range(len(self.ids))
        return logit_lens(
            self.model,
            self.tokenizer,
            self.ids,
            query=positions[query],
            first=positions[first],
            last=positions[last],
            top=top,
        )

    def logit_attribution(
        self,
        *,
        query: int = -1,
        target: bytes | None = None,
        left_out: range | None = None,
        progress: Callable[[float], None] = lambda _: None,
    ) -> AttributionReport:
        """Return the contributions to the logit of `target`, by default the most likely token.

        Each token of `left_out` (None: all up to the query) is left out in a pass of its own.
        Raises UsageError if `target` is empty or does not fit into the context.
        """
        query = range(len(self.ids))[query]
        return attribute_logit(
            self.model,
            self.tokenizer,
            self.ids,
            query=query,
            target=None if target is None else self._target_ids(target, query),
            left_out=left_out,
            progress=progress,
        )

    def activations(self, layer: str | None, parts: str | None) -> Activations:
        """Return the parts of these layers as arrays by name: texts such as "0,2-4" and
        "residual,heads", by default all layers' residual stream.

        Raises UsageError for other texts, ModelError if the arrays do not fit into RAM.
        """
        names = parse_parts("--parts", "residual" if parts is None else parts, PARTS)
        layers = parse_indices("--layer", "all" if layer is None else layer, self.config.n_layers)
        if layer is not None and set(names) <= {"final_norm", "logits"}:
            raise UsageError(f"--layer: no effect on {' and '.join(names)}", "remove --layer")
        check_ram(
            activation_bytes(self.config, len(self.ids), layers, names),
            f"activations of {len(self.ids):,} tokens",
            "shorten the text, or select fewer of --layer and --parts",
        )
        arrays, recorder = record_activations(self.model, self.ids, layers, names)
        self._add_checks(basic_checks(recorder))
        return arrays

    def ablation(
        self,
        groups: str | None = None,
        *,
        kind: AblationKind = "zero",
        top: int = 3,
        progress: Callable[[float], None] = lambda _: None,
    ) -> AblationReport:
        """Return the loss and the `top` next tokens without each group; groups such as
        "0.1+0.3,2", by default each layer's attention and feed-forward.

        Raises UsageError for other texts, and for a text of one token.
        """
        return ablate_groups(
            self.model,
            self.tokenizer,
            self.ids,
            parse_groups(groups, self.config),
            kind,
            top=top,
            progress=progress,
        )

    def patching(
        self,
        other: bytes,
        *,
        parts: str | None = None,
        query: int = -1,
        target: bytes | None = None,
        contrast: bytes | None = None,
        progress: Callable[[float], None] = lambda _: None,
    ) -> list[PatchReport]:
        """Return which activations restore the answer after position `query` when they replace
        those of the text `other`, one report per part.

        Raises UsageError if `other` is empty or has another number of tokens, or a token is none.
        """
        names = parse_parts("--parts", "residual" if parts is None else parts, PATCHED_PARTS)
        n_tokens = len(self.ids) + self.n_skipped
        if not other:
            raise UsageError("--patch is empty", "pass at least one character")
        other_ids = self.tokenizer.encode_prompt(other)
        if len(other_ids) != n_tokens:
            raise UsageError(
                f"--patch has {count(len(other_ids), 'token')}, the prompt {n_tokens:,}",
                "pass prompts of as many tokens, which tgen tokenize shows",
            )
        end = range(len(self.ids))[query] + 1
        return patch_activations(
            self.model,
            self.tokenizer,
            self.ids[:end],
            other_ids[self.n_skipped :][:end],
            names,
            target=None if target is None else self._single_id("--target", target),
            contrast=None if contrast is None else self._single_id("--contrast", contrast),
            progress=progress,
        )

    def verify(self) -> list[Check]:
        """Run all self-checks; errors as in `attention`."""
        self._check_ram(4 * self.config.n_heads)  # all heads of a layer, ours and the kernel's
        checks = verify(self.model, self.tokenizer, self.ids)
        self._add_checks(checks)
        return checks

    def ensure_checked(self) -> None:
        """Run the basic checks on every layer, unless a computation has done so."""
        if self.ids and not self._checks:
            recorder = AttentionRecorder(lambda *_: None, scale=self.config.score_scale)
            with torch.no_grad():
                self.model.hidden_states(token_batch(self.model, [self.ids]), recorder=recorder)
            self._add_checks(basic_checks(recorder))

    def _check_ram(self, n_matrices: int) -> None:
        n = len(self.ids)
        check_ram(
            4 * n_matrices * n * n,
            f"attention of {n:,} tokens (matrices: {n_matrices:,})",
            "shorten the text, or select fewer heads with --layer and --head",
        )

    def _target_ids(self, text: bytes, query: int) -> list[int]:
        ids = self.tokenizer.encode(text, continuation=True)
        if not ids:
            hint = "pass a word; most words begin with a space: --target ' the'"
            raise UsageError("--target is empty", hint)
        room = self.config.context_length - query
        if len(ids) > room:
            raise UsageError(
                f"--target has {len(ids):,} tokens, but the context has room for {room:,}",
                "shorten the target or the text",
            )
        return ids

    def _single_id(self, flag: str, text: bytes) -> int:
        ids = self.tokenizer.encode(text, continuation=True)
        if len(ids) != 1:
            hint = "most words begin with a space: ' the'"
            if ids:
                first = self.tokenizer.token_bytes(ids[0]).decode(errors="replace")
                hint = f"the first is {first!r}"
            word = text.decode(errors="replace")
            message = f"{flag}: {word!r} has {len(ids):,} tokens (expected 1)"
            raise UsageError(message, f"pass one token; {hint}")
        return ids[0]

    def _add_checks(self, checks: Sequence[Check]) -> None:
        for check in checks:
            before = self._checks.get(check.name)
            if before is None or larger_error(before.value, check.value) != before.value:
                self._checks[check.name] = check
