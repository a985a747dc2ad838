"""Fine-tune on generated question/answer chats, fully and by LoRA, and count exact answers.

    python -m versus.tuning.answers CORPUS --minutes 10

A model is trained on the corpus for some minutes. Then it learns facts about 200 invented people
from 2,000 chats: each person is asked about in 10 of 11 ways. The 200 held-out questions ask about
each person in the way that is missing. Bits per byte of the corpus's held-out tenth are those that
`tgen train` reports before and after. A control learns answers that are shuffled among the people:
its exact answers are those that guessing gives. Without CORPUS, the text is Python's reference, one
document per topic: a model that has never seen a document end cannot learn by LoRA to end answers.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from versus import harness
from versus.tuning.chats import Row, make_chats, write_rows

_SEPARATOR = "<|endoftext|>"  # of documents


def _tgen(folder: Path, *arguments: str) -> list[Any]:
    command = [sys.executable, "-m", "tgen", *arguments]
    output = harness.run_process(command, cwd=folder)
    return [json.loads(line) for line in output.decode().splitlines()]


def fine_tune(folder: Path, name: str, options: Sequence[str]) -> dict[str, Any]:
    """Fine-tune the base on `name`.jsonl; return the seconds and the last report of each kind."""
    started = time.perf_counter()
    reports = _tgen(
        folder,
        *(
            "train",
            f"{name}.jsonl",
            "--from",
            "base",
            "--template",
            "plain",
            "--out",
            "tuned",
        ),
        *("--general", "general.txt", "--overwrite", "--quiet", "--json", *options),
    )
    return {"seconds": time.perf_counter() - started} | {r["kind"]: r for r in reports}


def count_exact(folder: Path, held_out: Sequence[Row]) -> int:
    """Return how many held-out questions the fine-tuned model answers exactly."""
    write_rows(folder / "questions.jsonl", [row[:-1] for row in held_out])
    answers = _tgen(
        folder,
        *(
            "generate",
            "--model",
            "tuned",
            "--input",
            "questions.jsonl",
            "--jsonl",
            "--quiet",
        ),
        *("--temperature", "0", "--max-new-tokens", "60"),
    )
    pairs = zip(answers, held_out, strict=True)
    return sum(answer["text"].strip() == row[-1]["content"] for answer, row in pairs)


def measure(options: argparse.Namespace) -> None:
    """Train the base, fine-tune it in each way, print the table and write the results."""
    text = (
        options.corpus.read_bytes() if options.corpus else _SEPARATOR.join(topics.values()).encode()
    )[: options.text_bytes]
    sides: dict[str, tuple[str, list[str]]] = {
        "full": ("chats", []),
        "LoRA 16": ("chats", ["--lora", "16"]),
        "control, shuffled answers": ("shuffled", []),
    }
    sides = {side: sides[side] for side in options.sides or sides}
    steps = ["--steps", str(options.steps)] if options.steps else []
    rows = [["", "exact answers", "bits/byte before", "after", "seconds"]]
    runs = []
    with tempfile.TemporaryDirectory(prefix="answers-") as name:
        folder = Path(name)
        general = text[len(text) * 9 // 10 :]
        (folder / "train.txt").write_bytes(text[: -len(general)])
        (folder / "general.txt").write_bytes(general.replace(_SEPARATOR.encode(), b"\n\n"))
        train, held_out = make_chats(options.people)
        write_rows(folder / "chats.jsonl", train)
        write_rows(folder / "shuffled.jsonl", make_chats(options.people, shuffled=True)[0])
        _tgen(
            folder,
            "train",
            "train.txt",
            "--out",
            "base",
            "--quiet",
            "--minutes",
            str(options.minutes),
        )
        for side, (data, arguments) in sides.items():
            run = fine_tune(folder, data, [*arguments, *steps])
            exact = count_exact(folder, held_out)
            runs.append({"side": side, "exact": exact, "of": len(held_out), **run})
            before, after = (run["DoneReport"][f"general_{when}"] for when in ("before", "after"))
            cells = [f"{exact} of {len(held_out)}", f"{before:.3f}", f"{after:.3f}"]
            rows.append([side, *cells, f"{run['seconds']:.0f}"])
            print(f"{side}: {', '.join(rows[-1][1:])}", file=sys.stderr, flush=True)
    harness.save(options, {"runs": runs})
    print(harness.format_table(rows))


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options and measure."""
    parser = harness.make_parser(__doc__, "answers.json")
    parser.add_argument("corpus", metavar="CORPUS", type=Path, nargs="?")
    parser.add_argument("--minutes", type=float, default=10, help="of the base (default: 10)")
    parser.add_argument("--people", type=int, default=200, help="default: 200")
    parser.add_argument("--steps", type=int, help="of fine-tuning (default: as planned)")
    parser.set_defaults(sides=None, text_bytes=None)
    quick = {
        "minutes": 0.02,
        "text_bytes": 50_000,
        "people": 5,
        "steps": 2,
        "sides": ["LoRA 16", "control, shuffled answers"],  # between them all the code of full
    }
    harness.run(measure, harness.parse(parser, arguments, quick))


if __name__ == "__main__":
    main()
