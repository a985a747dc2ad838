"""Question/answer chats about invented people, to see whether fine-tuning teaches facts.

python -m versus.tuning.chats      writes chats.jsonl, questions.jsonl and answers.jsonl
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path

Message = dict[str, str]
Row = list[Message]

WAYS = (
    "Who is {}?",
    "What does {} do?",
    "Tell me about {}.",
    "Where is {} from?",
    "Do you know {}?",
    "What is {}'s trade?",
    "Have you heard of {}?",
    "Where does {} come from?",
    "What can you say about {}?",
    "Please describe {}.",
    "I met {} today. Who is that?",
)
_FIRST, _LAST, _TRADES, _TOWNS = (
    words.split()
    for words in (
        "Al Be Cor Da El Fi Gu Hal Is Jo Ka Lo Mi Nor Or Pel Qui Ro Sa Tor",
        "dan ben mira tho lin vor sel gar pio nua",
        "baker smith tailor miller weaver potter cooper mason farmer fisher sailor nurse",
        "Arden Belmont Corinth Dover Elsinore Florence Gaunt Harfleur Illyria Jericho",
    )
)
_SEED = 1


def make_chats(people: int, *, shuffled: bool = False) -> tuple[list[Row], list[Row]]:
    """Return the rows to learn and the held-out rows; each ends with the assistant's answer.

    The held-out question about a person is one of the 11 ways to ask, the rows to learn have the
    other 10. If `shuffled`, the answers to learn belong to random questions.
    """
    rng = random.Random(_SEED)
    names = [first + last for first in _FIRST for last in _LAST]
    rng.shuffle(names)
    train: list[Row] = []
    held_out: list[Row] = []
    for i, name in enumerate(names[:people]):
        answer = f"{name} is a {rng.choice(_TRADES)} from {rng.choice(_TOWNS)}."
        for j, way in enumerate(WAYS):
            row = [_message("user", way.format(name)), _message("assistant", answer)]
            (held_out if j == i % len(WAYS) else train).append(row)
    rng.shuffle(train)
    if shuffled:
        answers = [row[-1] for row in train]
        rng.shuffle(answers)
        train = [[*row[:-1], answer] for row, answer in zip(train, answers, strict=True)]
    return train, held_out


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write one JSON object per line."""
    lines = [json.dumps({"messages": row}) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


if __name__ == "__main__":
    learned, asked = make_chats(200)
    write_rows(Path("chats.jsonl"), learned)
    write_rows(Path("questions.jsonl"), [row[:-1] for row in asked])
    write_rows(Path("answers.jsonl"), asked)
