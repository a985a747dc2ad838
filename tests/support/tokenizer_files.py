"""Small tokenizer.json files like those of known models, and a text with all kinds of content."""

import json
import random
from functools import cache
from pathlib import Path

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from tgen.tokenizer import patterns
from tgen.tokenizer.patterns import (
    DEEPSEEK_CODER,
    DEEPSEEK_LLM,
    DEEPSEEK_V3,
    GPT2,
    LLAMA3,
    O200K,
    QWEN2,
    QWEN35,
    SINGLE_DIGITS,
    TEKKEN,
)

CODE = Path(__file__).with_name("code.txt")  # a change of it changes the tokenizers
SPECIAL = ["<|endoftext|>", "<s>", "</s>"]
PROSE = (
    "the King's don't I'LL we've naïve Über İstanbul Wörter straße 日本語 中文字符 한국어 текст "
    "עברית हिन्दी ไทย 🦋 👩‍👩‍👧 🇩🇪 e\u0301 A\u030a\u0301 ﬁ Ⅷ ½ ² 3.14 12345678 x_y HTTPServer"
)
ODD = "\0 \a \x1b[0m \x7f \x85 \xa0 \u200b \u2028 \u3000 ▁ \ufeff"
WHITE = " |  |   |        |\n|\n\n|\n\n\n|\r\n|\t| \n |\n\t|!\n/|?!\n\n"


@cache
def mixed(size: int, seed: int = 0) -> str:
    """Return about `size` bytes of code, prose, emoji, CJK, marks, controls and white space."""
    rng = random.Random(seed)
    words, odd, white = PROSE.split(" "), ODD.split(" "), WHITE.split("|")
    code = CODE.read_text().splitlines(keepends=True)
    parts, n = [], 0
    while n < size:
        kind = rng.random()
        if kind < 0.2:
            part = rng.choice(code)
        elif kind < 0.3:
            part = rng.choice(white)
        elif kind < 0.33:
            part = rng.choice(odd) + chr(rng.choice([0, 0xE000]) + rng.randrange(0xD800))
        else:
            end = rng.choice([" ", ". ", ",", "\n"])
            part = " ".join(rng.choices(words, k=rng.randrange(1, 9))) + end
        parts.append(part)
        n += len(part.encode())
    return "".join(parts)


def added(names, first=None, **flags):
    """Return entries of added_tokens with ids from `first` on."""
    rest = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [
        {"id": first + i, "content": name, **rest, "special": True, **flags}
        for i, name in enumerate(names)
    ]


def template(token, i):
    piece = {"SpecialToken": {"id": token, "type_id": 0}}
    text = [{"Sequence": {"id": name, "type_id": k}} for k, name in enumerate("AB")]
    named = {token: {"id": token, "ids": [i], "tokens": [token]}}
    return {
        "type": "TemplateProcessing",
        "single": [piece, text[0]],
        "pair": [piece, *text],
        "special_tokens": named,
    }


def level(prefix=False, regex=True):
    return {
        "type": "ByteLevel",
        "add_prefix_space": prefix,
        "trim_offsets": True,
        "use_regex": regex,
    }


def split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def inverted(pattern):
    """Return GPT-4o's way to split: everything but the matches is removed."""
    return split(pattern) | {"behavior": "Removed", "invert": True}


def punctuation(behavior="Contiguous"):
    return {"type": "Punctuation", "behavior": behavior}


def sequence(key, *parts):
    return {"type": "Sequence", key: list(parts)}


@cache
def _train_model(pattern: str) -> str:
    """Return the JSON of a BPE model: byte-level with `pattern`, of characters if it is empty."""
    backend = Tokenizer(models.BPE())
    alphabet = []
    if pattern:
        words = pre_tokenizers.Split(Regex(pattern), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [words, pre_tokenizers.ByteLevel(False, use_regex=False)]
        )
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=alphabet, limit_alphabet=300, show_progress=False
    )
    backend.train_from_iterator([mixed(60_000, 1)], trainer)
    return json.dumps(json.loads(backend.to_str())["model"])


def byte_level(
    pattern=GPT2, *, splitter=None, names=SPECIAL, normalizer=None, post=None, special=True, **model
):
    model_json = json.loads(_train_model(pattern)) | model
    if model_json["ignore_merges"]:  # some words are not reachable by merges
        model_json["merges"] = model_json["merges"][::2]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added(names, len(model_json["vocab"]), special=special),
        "normalizer": normalizer,
        "pre_tokenizer": splitter or sequence("pretokenizers", split(pattern), level(regex=False)),
        "post_processor": post(len(model_json["vocab"])) if post else level(),
        "decoder": level(),
        "model": model_json,
    }


def sentencepiece(*, normalizer=None, splitter=None, more=(), lines=False, **model):
    """Make a BPE of characters with byte fallback; with `lines`, tokens may contain newlines."""
    trained = json.loads(_train_model(""))
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += [name for name in trained["vocab"] if "\n" not in name or lines]
    known = set(names)
    merges = [[a, b] for a, b in trained["merges"] if {a, b, a + b} <= known]
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    spaces = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [*added(names[:3], 0), *more],
        "normalizer": normalizer,
        "pre_tokenizer": splitter,
        "post_processor": template("<s>", 1),
        "decoder": sequence("decoders", spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, strip),
        "model": trained
        | {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
        | {"vocab": {name: i for i, name in enumerate(names)}, "merges": merges}
        | model,
    }


REPLACE_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
LEGACY = sequence("normalizers", {"type": "Prepend", "prepend": "▁"}, REPLACE_SPACES)


def metaspace(scheme, split=False):
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split}


def digits(*, individual=True):
    return {"type": "Digits", "individual_digits": individual}


def splits(*patterns):
    """Return a pre-tokenizer of several patterns, before bytes."""
    parts = [digits() if p == SINGLE_DIGITS else split(p) for p in patterns]
    return sequence("pretokenizers", *parts, level(regex=False))


def falcon_splitter():
    groups = [digits(individual=False), split("[0-9][0-9][0-9]")]
    return sequence("pretokenizers", punctuation(), level(), *groups)


def gemma3():
    """Return a file like Gemma 3's: it splits at spaces, of which none is left."""
    n = len(sentencepiece()["model"]["vocab"])
    runs = added(["\n\n", "\n\n\n", "▁▁", "▁▁▁", "<h1>"], n, special=False)
    spaces = {"type": "Split", "pattern": {"String": " "}, "invert": False}
    splitter = spaces | {"behavior": "MergedWithPrevious"}
    file = sentencepiece(normalizer=REPLACE_SPACES, splitter=splitter, more=runs)
    file["decoder"]["decoders"].pop()
    return file


def neox():
    """Return a file like GPT-NeoX's: runs of spaces are tokens, after normalization."""
    file = byte_level(splitter=level(), normalizer={"type": "NFC"})
    first = max(token["id"] for token in file["added_tokens"]) + 1
    names = [" " * n for n in range(24, 1, -1)]
    return file | {
        "added_tokens": file["added_tokens"] + added(names, first, special=False, normalized=True)
    }


def openai_gpt():
    """Return a file like openai-gpt's: words of lower-case characters, without bytes."""
    words = [w for w in mixed(60_000, 1).lower().split() if w.isascii() and w.isalpha()]
    backend = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    alphabet = [*map(chr, range(33, 127))]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<unk>", *(f"{c}</w>" for c in alphabet)],
        initial_alphabet=alphabet,
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    backend.train_from_iterator([" ".join(words)], trainer)
    file = json.loads(backend.to_str())
    return file | {"added_tokens": file["added_tokens"][:1]}


def bos_processor(n):
    return sequence("processors", level(), template("<s>", n + 1))


@cache
def files():
    """Return a tokenizer.json, its model type and its class by name: not to be changed."""
    fast, nfc, thought = "PreTrainedTokenizerFast", {"type": "NFC"}, ["<think>", "¿té?"]
    smollm = sequence("pretokenizers", {"type": "Digits", "individual_digits": True}, level())
    first = metaspace("first")
    removed = sequence("pretokenizers", inverted(O200K), level(regex=False))
    no_affixes = {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    thinking = byte_level(QWEN2, normalizer=nfc, names=thought, special=False)
    return {
        "gpt2": (byte_level(splitter=level()), "gpt2", "GPT2Tokenizer"),
        "llama3": (byte_level(LLAMA3, post=bos_processor, ignore_merges=True), "llama", fast),
        "qwen2": (byte_level(QWEN2, normalizer=nfc), "qwen2", "Qwen2Tokenizer"),
        # transformers' GPT2Tokenizer would drop the Digits pre-tokenizer.
        "smollm": (byte_level(splitter=smollm), "llama", fast),
        "llama2": (sentencepiece(normalizer=LEGACY), "llama", fast),
        "mistral": (sentencepiece(splitter=first), "mistral", "LlamaTokenizer"),
        # More of these kinds:
        "prefix-space": (byte_level(splitter=level(prefix=True)), "gpt2", fast),
        "thinking": (thinking, "qwen3", fast),
        "marks": (byte_level(QWEN35, normalizer=nfc), "llama", fast),
        "o200k": (byte_level(O200K), "llama", fast),
        "tekken": (byte_level(TEKKEN), "mistral", "LlamaTokenizer"),
        "whole": (byte_level(splitter=level(regex=False)), "llama", fast),
        "llama2-resaved": (sentencepiece(splitter=first), "llama", "LlamaTokenizer"),
        "always": (sentencepiece(splitter=metaspace("always", True), lines=True), "llama", fast),
        "never": (sentencepiece(splitter=metaspace("never")), "llama", fast),
        "gpt4o": (byte_level(O200K, splitter=removed, **no_affixes), "llama", fast),
        "deepseek-v3": (byte_level(LLAMA3, splitter=splits(*DEEPSEEK_V3)), "llama", fast),
        "falcon": (byte_level(splitter=falcon_splitter()), "llama", fast),
        "gemma3": (gemma3(), "llama", fast),
        "neox": (neox(), "llama", fast),
    }


@cache
def more_files():
    """Return tokenizer.json files of models that are rarer, by name: not to be changed."""
    several = {"deepseek-coder": DEEPSEEK_CODER, "deepseek-llm": DEEPSEEK_LLM}
    several |= {"minicpm5": patterns.MINICPM5, "viking": patterns.VIKING}
    one = {"seed-coder": patterns.SEED_CODER, "bailing": patterns.BAILING}
    one |= {"jais2": patterns.JAIS2, "bloom": patterns.BLOOM}
    several |= {name: (pattern,) for name, pattern in one.items()}
    files = {name: byte_level(LLAMA3, splitter=splits(*each)) for name, each in several.items()}
    empty = sequence("normalizers")
    files["deepseek-coder"] |= {"normalizer": empty}
    for name in ("NFD", "NFKC", "NFKD", "Lowercase", "StripAccents"):
        normalizer = sequence("normalizers", {"type": "NFD"}, {"type": name})
        files[name] = byte_level(splitter=level(), normalizer=normalizer)
    files["sentencepiece-nfkc"] = sentencepiece(
        normalizer=sequence("normalizers", {"type": "NFKC"}, *LEGACY["normalizers"])
    )
    return files


MAIN = ["gpt2", "llama3", "qwen2", "smollm", "llama2", "mistral"]
