"""Chat templates and special tokens: unreadable ones are ignored if they are optional, and
tokenizer_config.json and tokenizer.json may disagree on the beginning-of-text token."""

import json

import pytest

from support.models import make_model
from support.tokenizer_files import LEGACY, sentencepiece, template
from tgen.checkpoint import model_dir
from tgen.checkpoint.chat_template import (
    bos_flag,
    chat_template_source,
    read_chat_template,
    special_tokens,
)
from tgen.errors import TgenError
from tgen.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")
# Classes that version 4.57 builds from the flags of tokenizer_config.json.
OBEDIENT = ("LlamaTokenizerFast", "LlamaTokenizer", "GemmaTokenizerFast")
CLASSES = (*OBEDIENT, "PreTrainedTokenizerFast", "GPT2TokenizerFast")


def test_unreadable_template_is_none(tmp_path):
    (tmp_path / "chat_template.jinja").mkdir()
    assert chat_template_source(tmp_path) is None
    assert special_tokens(tmp_path) == {}
    with pytest.raises(TgenError, match=r"chat_template\.jinja"):
        read_chat_template(tmp_path)


@pytest.mark.parametrize("flag", ["absent", None, False, True])
@pytest.mark.parametrize("in_file", [False, True], ids=["no template", "template"])
@pytest.mark.parametrize("name", CLASSES)
def test_bos_is_added_as_tokenizer_json_says(name, in_file, flag, tmp_path):
    file = sentencepiece(normalizer=LEGACY)
    i = file["model"]["vocab"]["<s>"]
    file["post_processor"] = template("<s>", i) if in_file else None
    tokenizer = Tokenizer(json.dumps(file))
    model = make_model("llama", vocab_size=tokenizer.vocab_size)
    model_dir.save(tmp_path, model.config, tokenizer, model.to_arrays())
    settings = {"tokenizer_class": name, "bos_token": "<s>", "eos_token": "</s>"}
    settings |= {} if flag == "absent" else {"add_bos_token": flag}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    bundle = model_dir.load(tmp_path)
    assert (bundle.tokenizer.encode_prompt(b"a king")[0] == i) == in_file
    disagrees = name in OBEDIENT and isinstance(flag, bool) and flag != in_file
    assert [("add_bos_token" in warning) for warning in bundle.warnings] == [True] * disagrees
    if not disagrees and (flag in (False, True) or name not in OBEDIENT):
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        assert (theirs("a king")["input_ids"][0] == i) == in_file


def test_damaged_tokenizer_config_has_no_flag(tmp_path):
    for text in ("{", "[]", '{"tokenizer_class": ["LlamaTokenizer"]}', "{}"):
        (tmp_path / "tokenizer_config.json").write_text(text)
        assert bos_flag(tmp_path) is None
