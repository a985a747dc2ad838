"""Conversations to train on: the tokens that generation sees, and a mask of exactly the answers."""

import json
import random
from functools import cache

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from support.chats import (
    CHATML,
    DATED,
    GEMMA,
    LLAMA,
    MISTRAL,
    NO_END,
    OWN_SYSTEM,
    PHI3,
    QWEN3,
    SYSTEM,
    assistant,
    extend_tokenizer,
    user,
)
from support.models import TEXT
from support.tokenizer_files import files
from support.vocabularies import smollm2_like
from tgen.chat.encode import ChatFormat
from tgen.chat.plain_template import plain_template
from tgen.chat.training_rows import Row, RowEncoder, RowError, own_system_text
from tgen.checkpoint.chat_template import ChatTemplate
from tgen.errors import UsageError
from tgen.tokenizer import Tokenizer, train_bpe

TOKENIZER = extend_tokenizer(train_bpe([TEXT], vocab_size=300))
IDS = TOKENIZER.added_tokens
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
PLAIN = plain_template("", "<|endoftext|>")
LARGE = 1 << 20


def same(text):
    return text


def trimmed(text):
    return text.strip()


# template -> its source, its end of an answer, and how it writes the content of an answer
TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>", same),
    "own system": (OWN_SYSTEM, "<|im_end|>", same),
    "dated": (DATED, "<|im_end|>", same),
    "llama": (LLAMA, "<|eot_id|>", trimmed),
    "mistral": (MISTRAL, "</s>", lambda text: " " + text),
    "gemma": (GEMMA, "<|im_end|>", trimmed),
    "qwen3": (
        QWEN3,
        "<|im_end|>",
        lambda text: "<think>\n\n</think>\n\n" + text.split("</think>")[-1],
    ),
    "phi3": (PHI3, "<|im_end|>", same),
    "no end": (NO_END, "<|endoftext|>", lambda text: " " + text),
    "plain": (PLAIN, "<|endoftext|>", lambda text: " " + text.strip()),
}
END_IDS = {"phi3": [IDS["</s>"], IDS["<|im_end|>"]]}
ONE = Row([*user("Who?"), assistant("I.")], [1])


def make_chat(source, tokenizer=TOKENIZER, now="2026-11-23T10:00:00"):
    return ChatFormat(ChatTemplate(source, VARIABLES), tokenizer, LARGE, now=now)


@cache
def chat_of(name):
    return make_chat(TEMPLATES[name][0])


@cache
def encoder_of(name):
    ends = END_IDS.get(name, [IDS["<|endoftext|>"]])
    return RowEncoder(chat_of(name), TOKENIZER, ends, ONE)


def encode(name, messages, answers=None, max_tokens=LARGE):
    if answers is None:
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    (row,) = encoder_of(name).encode([Row(messages, answers)], max_tokens)
    return row


def spans(mask):
    """Yield the start and the end of each run of targets."""
    edges = [i for i in range(1, len(mask) + 1) if i == len(mask) or mask[i] != mask[i - 1]]
    starts = [0, *edges[:-1]]
    yield from ((a, b) for a, b in zip(starts, edges, strict=True) if mask[a])


PIECES = ["", " ", "\n", "\r\n", "\t", "foo", " bar.", "日本", "🦋", "'Tis", "<|im_end|>", "</s>"]
PIECES += ["<|im_start|>user\n", "<|im_", "end|>", "[INST]", "<|endoftext|>", "A:", "\udcff"]
PIECES += ["<think>\nhm\n</think>\n\n", "<s>", "<other>", "\U000f0000"]
CONTENTS = st.lists(st.sampled_from(PIECES), max_size=4).map("".join)
TURNS = st.lists(st.tuples(CONTENTS, CONTENTS, st.booleans()), min_size=1, max_size=5)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=12, deadline=None)
@given(system=st.none() | CONTENTS, turns=TURNS)
def test_context_is_that_of_generation_and_exactly_the_answers_are_targets(name, system, turns):
    _, end, write = TEMPLATES[name]
    messages = [{"role": "system", "content": system}] * (system is not None and name != "gemma")
    answers = []
    for question, answer, is_learned in turns:
        messages += [*user(question), assistant(answer)]
        answers += [len(messages) - 1] * is_learned
    answers = answers or [len(messages) - 1]
    try:
        contexts = [chat_of(name).encode(messages[:i]) for i in answers]
    except UsageError:
        contexts = []
    if not contexts:
        with pytest.raises(RowError):
            encode(name, messages, answers)
        return
    row = encode(name, messages, answers)
    learned = [(one, *span) for one in row.examples for span in spans(one.loss_mask)]
    assert len(learned) == len(answers)
    assert not row.cut
    for (example, start, stop), context, i in zip(learned, contexts, answers, strict=True):
        assert example.ids[:start] == context
        *text, last = example.ids[start:stop]
        assert last == IDS[end]
        assert last not in text
        written = write(messages[i]["content"])
        decoded = TOKENIZER.decode(text, continuation=True)
        assert decoded == written.encode("utf-8", "surrogateescape")
    n_examples = len(row.examples)
    assert (
        n_examples == 1
        or name in ("qwen3", "no end")
        or "\n" in "".join(messages[i]["content"] for i in answers)
    )


def test_turns_share_an_example_unless_the_template_rewrites_them():
    messages = [SYSTEM, *user("a?"), assistant("b."), *user("c?"), assistant("d.")]
    for name in TEMPLATES:
        if name == "gemma":
            continue
        n = len(encode(name, messages).examples)
        assert n == (2 if name in ("qwen3", "no end") else 1), name
    assert len(encode("gemma", messages[1:]).examples) == 1


def test_mask_is_that_of_generation_marks():
    """`{% generation %}`, which few templates have, marks the same tokens in transformers."""
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(TOKENIZER.json),
        bos_token="<s>",
        eos_token="</s>",
    )
    tool = {"role": "tool", "content": "4"}
    marked = CHATML.replace(
        "{{- '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}",
        "{{- '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' %}"
        "{% generation %}{{- m['content'] + '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}"
        "{% else %}{{- m['content'] + '<|im_end|>\\n' }}{% endif %}",
    )
    assert marked != CHATML
    chats = [
        [*user("Who?"), assistant("The king.")],
        [SYSTEM, *user("2 + 2?"), assistant("Let me see."), tool, assistant("It is 4.")],
        [
            *user("a"),
            assistant("b 日本"),
            *user("c\n"),
            assistant("d"),
            *user(" e"),
            assistant("f"),
        ],
    ]
    for messages in chats:
        for name, source in (("chatml", marked), ("mistral", MISTRAL)):
            if name == "mistral" and tool in messages:
                continue
            expected = reference.apply_chat_template(
                messages, chat_template=source, return_dict=True, return_assistant_tokens_mask=True
            )
            (example,) = encode(name, messages).examples
            n = len(example.ids)
            assert example.ids == expected["input_ids"][:n]
            assert list(map(int, example.loss_mask)) == expected["assistant_masks"][:n]
            assert not any(expected["assistant_masks"][n:])


def test_one_token_begins_the_conversation():
    for name in ("llama", "mistral", "gemma"):
        messages = [*user("a?"), assistant("b."), *user("c?"), assistant("d.")]
        (example,) = encode(name, messages).examples
        assert example.ids[0] == IDS["<s>"]
        assert example.ids.count(IDS["<s>"]) == 1


def test_answers_that_do_not_fit_are_cut_after_a_whole_turn():
    messages = [*user("a?"), assistant("b."), *user("c?"), assistant("d.")]
    (whole,) = encode("chatml", messages).examples
    (first,) = encode("chatml", messages[:2]).examples
    assert not encode("chatml", messages, max_tokens=len(whole.ids)).cut
    shorter = encode("chatml", messages, max_tokens=len(whole.ids) - 1)
    assert shorter.cut
    assert shorter.examples == [first]
    none = encode("chatml", messages, max_tokens=len(first.ids) - 1)
    assert (none.cut, none.examples) == (True, [])
    long = [*user("a?"), assistant("b."), *user("c" * (1 << 21)), assistant("d.")]
    assert encode("chatml", long).examples == [first]


def test_row_that_the_template_rejects_is_named():
    rows = [ONE] * 300
    rows[270] = Row([SYSTEM, *user("a"), assistant("b")], [2])
    with pytest.raises(RowError, match="the chat template rejects the messages: roles") as error:
        list(encoder_of("gemma").encode(rows, LARGE))
    assert error.value.row == 270
    assert "--template" in error.value.hint
    for source, words in [
        ("{% for m in messages %}{{ m.content }}{% endfor %}{{ 1/0 }}", "ZeroDivisionError"),
        ("{% for %}", "TemplateSyntaxError"),
    ]:
        with pytest.raises(RowError, match=words):
            RowEncoder(make_chat(source), TOKENIZER, [], ONE)
    source = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    source += "{% if add_generation_prompt %}:{% endif %}"
    encoder = RowEncoder(make_chat(source), TOKENIZER, [], ONE)
    with pytest.raises(RowError, match="does not begin the answer as it begins one"):
        list(encoder.encode([ONE], LARGE))


def test_end_of_an_answer_is_one_of_the_models_or_the_first_control_token():
    source = CHATML.replace("'<|im_end|>' + '\\n'", "'<|eot_id|><|im_end|>' + '\\n'")
    assert source != CHATML
    for ends, expected in [(["</s>"], "<|eot_id|>"), (["<|im_end|>"], "<|im_end|>")]:
        encoder = RowEncoder(make_chat(source), TOKENIZER, [IDS[name] for name in ends], ONE)
        assert encoder.end_id == IDS[expected]
        assert not encoder.adds_end
    assert encoder_of("no end").adds_end


def test_rows_are_encoded_together_as_alone():
    rng = random.Random(0)
    rows = []
    for _ in range(600):
        messages = []
        for _ in range(rng.randint(1, 4)):
            texts = (rng.choice(PIECES) + rng.choice(PIECES) for _ in range(2))
            question, answer = texts
            messages += [*user(question), assistant(answer)]
        rows.append(Row(messages, list(range(1, len(messages), 2))))
    together = list(encoder_of("chatml").encode(rows, LARGE))
    for i in range(0, 600, 60):
        assert [together[i]] == list(encoder_of("chatml").encode([rows[i]], LARGE))


def test_date_is_the_one_that_was_given():
    (example,) = encode("dated", ONE.messages).examples
    assert b"It is 23 November 2026." in TOKENIZER.decode(example.ids)
    other = make_chat(DATED, now="2020-02-03T00:00:00")
    assert b"It is 03 February 2020." in TOKENIZER.decode(other.encode(user("a")))


def test_systems_text_of_the_template_is_found():
    expected = {"own system": "You are kind.", "dated": "It is 23 November 2026."}
    for name in TEMPLATES:
        # The dated template writes its message beside the user's.
        wanted = "" if name == "dated" else expected.get(name, "")
        assert own_system_text(chat_of(name)) == wanted, name
    llama = (
        "{{- bos_token + '<|start_header_id|>system<|end_header_id|>\\n\\nIt is late.\\n' }}"
        "{%- if messages[0].role == 'system' %}{{- messages[0].content }}{% endif %}"
        "{{- '<|eot_id|>' }}{%- for m in messages %}{%- if m.role != 'system' %}"
        "{{- m.content + '<|eot_id|>' }}{% endif %}{% endfor %}"
    )
    assert own_system_text(make_chat(llama)) == "It is late."


def test_characters_without_tokens_are_replaced_and_counted():
    tokenizer = smollm2_like(TOKENIZER)
    chat = make_chat(CHATML, tokenizer)
    encoder = RowEncoder(chat, tokenizer, [], ONE)
    (row,) = encoder.encode([Row([*user("a\x04"), assistant("b\x13c")], [1])], LARGE)
    assert row.n_replaced == 2
    text = tokenizer.decode(row.examples[0].ids).decode()
    assert text == "user\na\N{REPLACEMENT CHARACTER}\nassistant\nb\N{REPLACEMENT CHARACTER}c"


@pytest.mark.parametrize("kind", ["llama2", "mistral", "always", "prefix-space"])
def test_answer_continues_its_context(kind):
    """An answer has no space before it, even if the tokenizer puts one before a text."""
    tokenizer = Tokenizer(json.dumps(files()[kind][0]))
    source = "{{ bos_token }}{% for m in messages %}{{ m.content }}"
    source += "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    chat = make_chat(source, tokenizer)
    row = Row([*user("to be"), assistant("or not")], [1])
    encoder = RowEncoder(chat, tokenizer, [tokenizer.added_tokens["</s>"]], row)
    ((example,), _, _) = next(encoder.encode([row], LARGE))
    n = example.loss_mask.index(True)
    assert example.ids[:n] == chat.encode(row.messages[:1])
    assert tokenizer.decode(example.ids[n:], continuation=True) == b"or not"
