"""All sampling options, each declared once."""

import json
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any, Literal

from tgen.config.option import check_ranges, is_number, option, require, widen_floats
from tgen.errors import UsageError

Draft = Literal["auto", "off"]
Overflow = Literal["slide", "stop", "error"]
Text = str | bytes
SAMPLERS = ("top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature")
DEFAULT_BATCH_SIZE = 64  # sequences per batch
TEXTS = ("stop", "ban", "require", "choices", "dry_breakers")
CONSTRAINTS = ("choices", "regex", "json_schema", "grammar")

_MAX_STRINGS = 1000  # strings per option

_output = partial(option, panel="Output")
_constraint = partial(option, panel="Constraints and stopping")
_penalty = partial(option, panel="Penalties")
_rare = partial(option, panel="Other samplers")
_MASS = "a number above 0 and up to 1 (1 disables it)"
_ABOVE_ZERO = 5e-324


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Sampling options: logits processors and penalties, then `samplers` in their order.

    Strings may be str or bytes. Raises UsageError for values that cannot be used.
    """

    max_new_tokens: int = option(
        256, "Maximum number of tokens to generate.", "--max-new-tokens -n", low=0
    )
    temperature: float = option(
        0.8, "Sampling temperature; 0 is greedy.", "--temperature -t", low=0
    )
    top_k: int = option(
        40, "Top-k sampling: number of tokens to keep; 0 disables it.", "--top-k", low=0
    )
    top_p: float = option(
        1.0,
        "Nucleus sampling threshold; 1 disables it.",
        "--top-p",
        low=_ABOVE_ZERO,
        high=1,
        expected=_MASS,
    )
    # Rows that differ in the seed alone are sampled together.
    seed: int = option(
        0,
        "Random seed; the same seed repeats the text.",
        "--seed",
        shown_default="random, printed",
        low=0,
        high=2**63 - 1,
        expected="a number from 0 to 2^63 - 1",
        compare=False,
    )
    stop: Sequence[Text] = option(
        (), "Stop before this string; repeatable.", "--stop", metavar="TEXT"
    )
    until_newline: bool = _constraint(False, "Stop before the first line break.", "--until-newline")
    ban: Sequence[Text] = _constraint(
        (), "Never generate this string; repeatable.", "--ban", metavar="TEXT"
    )
    require: Sequence[Text] = _constraint(
        (), "Make sure that this string appears; repeatable.", "--require", metavar="TEXT"
    )
    bias: Mapping[Text, float] | Sequence[tuple[Text, float]] = _constraint(
        (),
        "Add N to the logits of tokens that complete TEXT; repeatable.",
        "--bias",
        metavar="TEXT=N",
    )
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = _constraint(
        (),
        "Add N, from -100 to 100, to the logit of the token with this id; repeatable.",
        "--logit-bias",
        metavar="ID=N",
    )
    stop_token_ids: Sequence[int] = _constraint(
        (), "Stop before the token with this id; repeatable.", "--stop-token-ids", metavar="ID"
    )
    min_tokens: int = _constraint(
        0,
        "Number of tokens before which no end token or stop string can appear; 0 disables it.",
        "--min-tokens",
        low=0,
    )
    ignore_eos: bool = _constraint(False, "Never generate the model's end tokens.", "--ignore-eos")
    choices: Sequence[Text] | None = _constraint(
        None,
        "Generate exactly one of these strings; a JSON list allows commas in them. Repeatable.",
        "--choices",
        metavar="A,B,...",
    )
    regex: str | None = _constraint(
        None, "Generate a text that matches this regular expression.", "--regex", metavar="REGEX"
    )
    json_schema: str | Mapping[str, Any] | bool | None = _constraint(
        None,
        "Generate a JSON document that is valid under this JSON schema.",
        "--json-schema",
        metavar="FILE|TEXT",
    )
    grammar: str | None = _constraint(
        None,
        "Generate a text that this Lark or GBNF grammar allows.",
        "--grammar",
        metavar="FILE|TEXT",
    )
    words: Text | None = _constraint(
        None,
        "Generate only words of this text; corpus: the model's training and held-out text.",
        "--words",
        metavar="FILE|corpus",
    )
    logprobs: int = _output(
        0,
        "Number of most likely tokens per position to add to the JSON output; 0 adds none.",
        "--logprobs",
        metavar="K",
        low=0,
    )
    explain: bool = _output(
        False,
        "Add each token's probability, rank and entropy, and the number of candidates that each "
        "sampler removed, to the JSON output.",
        "--explain",
    )
    overflow: Overflow = _constraint(
        "slide",
        "Action when the context is full: keep its last half and continue (slide), stop, or reject "
        "texts that might not fit (error).",
        "--overflow",
    )
    repetition_penalty: float = _penalty(
        1.0, "Repetition penalty; 1 disables it.", "--repetition-penalty", low=1e-3, high=1000
    )
    presence_penalty: float = _penalty(
        0.0,
        "Presence penalty: subtracted from the logit of every token that occurred; 0 disables it.",
        "--presence-penalty",
        low=-1_000_000,
        high=1_000_000,
    )
    frequency_penalty: float = _penalty(
        0.0,
        "Frequency penalty: subtracted from a token's logit per occurrence; 0 disables it.",
        "--frequency-penalty",
        low=-1_000_000,
        high=1_000_000,
    )
    penalty_window: int = _penalty(
        0,
        "Number of latest tokens that penalties other than --no-repeat-ngram consider; 0 considers "
        "all.",
        "--penalty-window",
        low=0,
    )
    penalize_prompt: bool = _penalty(
        True,
        "Apply penalties to generated tokens only, not to the prompt.",
        "--no-penalize-prompt",
    )
    no_repeat_ngram: int = _penalty(
        0,
        "Length of n-grams that must not repeat, in tokens; 0 disables it.",
        "--no-repeat-ngram",
        low=0,
    )
    dry_multiplier: float = _penalty(
        0.0,
        "DRY repetition penalty: multiplier; 0 disables it.",
        "--dry-multiplier",
        low=0,
        high=1_000_000,
    )
    dry_base: float = _penalty(
        1.75, "DRY: penalty factor per token of repeat length.", "--dry-base", low=1, high=1_000_000
    )
    dry_allowed_length: int = _penalty(
        2, "DRY: repeat length without penalty, in tokens.", "--dry-allowed-length", low=1
    )
    dry_breakers: Sequence[Text] = _penalty(
        ("\n", ":", '"', "*"),
        "DRY: string that ends a repeat; repeatable.",
        "--dry-breakers",
        metavar="TEXT",
        shown_default='newline, : " and *',
    )
    min_p: float = _rare(
        0.0,
        "Minimum probability relative to the top token; 0 disables it.",
        "--min-p",
        low=0,
        high=1,
    )
    typical_p: float = _rare(
        1.0,
        "Locally typical sampling: probability mass to keep; 1 disables it.",
        "--typical-p",
        low=_ABOVE_ZERO,
        high=1,
        expected=_MASS,
    )
    top_n_sigma: float = _rare(
        0.0,
        "Top-n-sigma sampling: standard deviations below the top logit to keep; 0 disables it.",
        "--top-n-sigma",
        low=0,
        high=1_000_000,
    )
    xtc_probability: float = _rare(
        0.0,
        "XTC: probability of removing all top tokens but the least likely; 0 disables it.",
        "--xtc-probability",
        low=0,
        high=1,
    )
    xtc_threshold: float = _rare(
        0.1,
        "XTC: minimum probability of a token to count as a top token.",
        "--xtc-threshold",
        low=0,
        high=1,
    )
    samplers: Sequence[str] = _rare(
        SAMPLERS,
        f"Samplers to apply, in order, separated by commas: {', '.join(SAMPLERS)}.",
        "--samplers",
        metavar="NAME,...",
        shown_default="all, in this order",
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        widen_floats(self)
        for name in TEXTS:
            value = getattr(self, name)
            if name == "choices" and value is None:
                continue
            texts = (value,) if isinstance(value, (str, bytes)) else value
            require(_is_sequence(texts), name, repr(value), "a string or a list of strings")
            self._set(name, tuple(_check_text(name, text) for text in texts))
        require(self.choices != (), "choices", "[]", "a list of at least one string")
        pairs = self.bias.items() if isinstance(self.bias, Mapping) else self.bias
        valid = isinstance(self.bias, Mapping) or (
            _is_sequence(pairs) and all(_is_sequence(pair) and len(pair) == 2 for pair in pairs)
        )
        require(valid, "bias", repr(self.bias), 'a number per string, such as {"king": 2}')
        self._set("bias", tuple((_check_text("bias", text), value) for text, value in pairs))
        self._set("logit_bias", _read_logit_bias(self.logit_bias))
        ids = self.stop_token_ids
        valid = _is_sequence(ids) and all(map(_is_id, ids))
        require(valid, "stop_token_ids", repr(ids), "a list of token ids")
        self._set("stop_token_ids", tuple(map(int, ids)))
        limited = ("stop", "ban", "require", "bias", "dry_breakers", "logit_bias", "stop_token_ids")
        for name in limited:  # they are looked up at every token
            if (n := len(getattr(self, name))) > _MAX_STRINGS:
                kind = "ids" if name in ("logit_bias", "stop_token_ids") else "strings"
                message = f"{name}: too many {kind} (got {n:,}, limit {_MAX_STRINGS:,})"
                raise UsageError(message, f"pass fewer {kind}", field=name)
        for value in self.biases.values():
            valid = is_number(value) and abs(value) <= 1e6
            require(valid, "bias", repr(value), "a number from -1e6 to 1e6")
        names = self.samplers.split(",") if isinstance(self.samplers, str) else self.samplers
        is_list = _is_sequence(names) and all(isinstance(name, str) for name in names)
        require(is_list, "samplers", repr(names), f"names from {', '.join(SAMPLERS)}")
        names = [name.strip().replace("-", "_") for name in names if name.strip()]
        self._set("samplers", tuple(names))
        valid = len(set(names)) == len(names) and set(names) <= set(SAMPLERS)
        expected = f"names from {', '.join(SAMPLERS)}, each at most once"
        require(valid, "samplers", ",".join(names) or "''", expected)
        if isinstance(self.json_schema, (Mapping, bool)):
            try:
                self._set("json_schema", json.dumps(self.json_schema))
            except (TypeError, ValueError):
                require(
                    False, "json_schema", repr(self.json_schema), "values that JSON can represent"
                )
        for name in ("regex", "json_schema", "grammar"):
            if (value := getattr(self, name)) is not None:
                _check_text(name, value)
                if isinstance(value, str):
                    valid = value.encode(errors="replace").decode() == value  # without surrogates
                    require(valid, name, repr(value), "valid Unicode")
        # Bytes store their hash; the messages of a check would take long for each row of an input.
        if self.words is not None and not (self.words and isinstance(self.words, bytes)):
            self._set("words", raw(_check_text("words", self.words)))
        self._check_combinations()

    def _check_combinations(self) -> None:
        excluded = [*self.stops, *map(raw, self.ban)]
        for text in map(raw, self.require):
            possible = not any(other in text for other in excluded)
            shown = repr(text.decode(errors="replace"))
            require(possible, "require", shown, "a string without banned or stop strings")
        constraints = [name for name in CONSTRAINTS if getattr(self, name)]
        names = ("require", "stop_token_ids", "min_tokens", "ignore_eos", "words")
        others = [name for name in names if getattr(self, name)]
        if constraints and len(constraints + others) > 1:
            one, two = constraints[:2] if len(constraints) > 1 else (others[0], constraints[0])
            hint = "remove one of them: a constraint ends the text"
            raise UsageError(f"{one} cannot be combined with {two}", hint, field=f"{one} {two}")

    def with_seed(self, seed: int) -> "SamplingConfig":
        """Return the same options with another seed; unlike `replace`, skip validation."""
        other = copy(self)
        other._set("seed", seed)
        return other

    @property
    def biases(self) -> dict[bytes, float]:
        """Logit bias per string."""
        return {raw(text): value for text, value in dict(self.bias).items()}

    @property
    def stops(self) -> list[bytes]:
        """All stop strings."""
        return [*map(raw, self.stop), *([b"\n"] if self.until_newline else [])]

    @property
    def constrained(self) -> bool:
        """Whether choices, a regex, a JSON schema or a grammar constrain the text."""
        return any(getattr(self, name) for name in CONSTRAINTS)

    @property
    def penalizes(self) -> bool:
        """Whether any penalty is on."""
        repeats = self.dry_multiplier != 0 or self.no_repeat_ngram > 0
        return self.penalizes_occurrence or repeats

    @property
    def penalizes_occurrence(self) -> bool:
        """Whether tokens that occurred are penalized, repeated or not."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def raw(text: Text) -> bytes:
    """Return the bytes of a text."""
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")


def _read_logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """Return pairs of a token id and its bias; JSON has the ids as strings."""
    expected = 'a number from -100 to 100 per token id, such as {"50256": -100}'
    pairs = value.items() if isinstance(value, Mapping) else value
    is_valid = isinstance(value, Mapping) or _is_sequence(value)
    require(is_valid, "logit_bias", repr(value), expected)
    biases = {}
    for pair in pairs:
        require(_is_sequence(pair) and len(pair) == 2, "logit_bias", repr(pair), expected)
        i, bias = pair
        if isinstance(i, str) and i.isascii() and i.isdecimal() and len(i) < 20:
            i = int(i)
        valid = _is_id(i) and is_number(bias) and abs(bias) <= 100
        require(valid, "logit_bias", f"{pair[0]!r}: {bias!r}", expected)
        biases[int(i)] = float(bias)
    return tuple(biases.items())


def _is_id(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _check_text(name: str, text: Any) -> Text:
    require(isinstance(text, (str, bytes)), name, repr(text), "text")
    require(len(text) > 0, name, "''", "a string of at least one character")
    try:
        raw(text)
    except UnicodeEncodeError:
        require(False, name, repr(text), "valid Unicode or bytes")
    return text  # type: ignore[no-any-return]
