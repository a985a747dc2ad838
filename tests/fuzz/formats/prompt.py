"""Prompts and flags of `tgen generate`, as a shell passes them."""

import os
from pathlib import Path
from random import Random

from fuzz.formats.command import Command
from fuzz.mutations import ESCAPES

_TEXTS = [
    *("the king", "", " ", "-", "--", "-n", "\n", "\x1b[2J", ESCAPES, "\u202e\u2066", "\ufeff"),
    *("a" * 100_000,),
    *("<|endoftext|>", "<|pad|>", "<|endof", "é日🦋👩‍👩‍👧", "e\u0301" * 500),
    *(os.fsdecode(b"\xff\xfe\xc3"), "[red]x[/red]"),
    *(os.fsdecode("\ud800".encode("utf-8", "surrogatepass")), "\u2028", "a\r\nb\t", "{{ x }}"),
    *("%s%n", "$HOME", "@x", "*"),
]  # fmt: skip
_NUMBERS = [
    *(
        "0",
        "1",
        "2",
        "-1",
        "0.5",
        "1.5",
        "-0",
        "1e999",
        "-1e999",
        "nan",
        "inf",
        "1e-320",
        "9" * 400,
        "9" * 5000,
    ),
    *(
        "2147483648",
        "9223372036854775807",
        "9223372036854775808",
        "1_0",
        "0x10",
        "",
        " 1",
        "１",
        "1,2",
        "x",
        "1e5",
    ),
]
_NUMBER_FLAGS = [
    *(
        "-n",
        "-t",
        "--top-k",
        "--top-p",
        "--min-p",
        "--typical-p",
        "--top-n-sigma",
        "--seed",
        "--samples",
    ),
    *(
        "--batch-size",
        "--logprobs",
        "--repetition-penalty",
        "--presence-penalty",
        "--frequency-penalty",
    ),
    *(
        "--penalty-window",
        "--no-repeat-ngram",
        "--dry-multiplier",
        "--dry-base",
        "--dry-allowed-length",
    ),
    *("--xtc-probability", "--xtc-threshold", "--threads"),
    *("--min-tokens", "--stop-token-ids"),
]
_TEXT_FLAGS = [
    *(
        "--stop",
        "--ban",
        "--require",
        "--bias",
        "--logit-bias",
        "--choices",
        "--regex",
        "--samplers",
        "--overflow",
        "--draft",
    ),
    *(
        "--dtype",
        "--device",
        "--dry-breakers",
        "--system",
        "--json-schema",
        "--grammar",
        "--words",
        "--input",
        "--load-cache",
        "--model",
    ),
    *("--save-cache", "--unknown", "extra"),
]
_SWITCHES = [
    *(
        "--json",
        "--jsonl",
        "--echo",
        "--stats",
        "-q",
        "--no-kv-cache",
        "--explain",
        "--ignore-eos",
        "--until-newline",
        "--chat",
    ),
    *("--no-penalize-prompt", "--interactive", "--debug"),
]
_VALUES = [
    *_TEXTS,
    *_NUMBERS,
    *("a=1", "a=1e999", "=1", "a=nan", "top_k,min_p", "top_k,top_k", ",", "[a-z]+", "("),
    *("(a{0,99}){0,99}",),
    *("slide", "stop", "error", "off", "auto", "int8", "bfloat16", "float32", "cuda", "cpu"),
    *("mps", "schema.json"),
    *("/proc/version", "/dev/null", "/dev/zero", ".", "..", "/proc", "missing/x", "x" * 300),
    *("a\0b", "prompt.cache"),
]  # fmt: skip


class Prompt:
    """A prompt with flags."""

    prints = True
    starts_processes = False

    def __init__(self, folder: Path) -> None:
        self._command = Command(folder)
        (folder / "schema.json").write_text('{"type": "integer"}')
        self._words: list[str] = []

    def change(self, i: int, rng: Random) -> str:
        """Choose a prompt and up to four flags."""
        words = ["-p", rng.choice(_TEXTS), "-n", "3"]
        for _ in range((1, 1, 2, 4)[i % 4]):
            kind = rng.random()
            if kind < 0.4:
                words += [rng.choice(_NUMBER_FLAGS), rng.choice(_NUMBERS)]
            elif kind < 0.8:
                words += [rng.choice(_TEXT_FLAGS), rng.choice(_VALUES)]
            else:
                words.append(rng.choice(_SWITCHES))
        if rng.random() < 0.05:
            rng.shuffle(words)
        self._words = words
        return repr([word[:60] for word in words])

    def read(self) -> None:
        """Run the command."""
        self._command.run(*self._words)
