"""The model card of a run, from its record and its last reports."""

import json
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from tgen.checkpoint import model_card
from tgen.planning.costs import n_parameters
from tgen.reports.number_format import count
from tgen.reports.training import DoneReport, MemorizationReport, RunReport
from tgen.runs.run_record import RunRecord
from tgen.version import __version__

_PATH_AFTER = re.compile(r"(-\w|[^/~]*[=:])?([/~].*)", re.DOTALL)


def save_card(out: Path, record: RunRecord, reports: Iterable[RunReport]) -> None:
    """Write the card of a run's model with the results in its last reports, unless the user has
    edited it."""
    model_card.save(out, "\n".join([*_front_matter(record), *_body(out, record, reports)]) + "\n")


def _without_folders(text: str) -> str:
    """Return an absolute path, also after an option or `file:`, without folders; else the text."""
    if Path(text).is_absolute():
        return Path(text).name
    found = _PATH_AFTER.fullmatch(text)
    return f"{found[1] or ''}{Path(found[2]).name}" if found else text


def _base(record: RunRecord) -> str | None:
    """Return the name of the base model: the Hub's if its cache has it, else the directory's."""
    if record.start_from is None:
        return None
    for part in reversed(Path(record.start_from).parts):
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/", 1)
    return Path(record.start_from).name


def _licenses(record: RunRecord) -> dict[str, str]:
    fields = model_card.read_fields(Path(record.start_from)) if record.start_from else {}
    return {name: value for name, value in fields.items() if name.startswith("license")}


def _front_matter(record: RunRecord) -> Iterator[str]:
    base = _base(record)
    yield "---"
    yield f"library_name: {'transformers' if record.adapter is None else 'peft'}"
    yield "pipeline_tag: text-generation"
    if base is not None:
        yield f"base_model: {json.dumps(base)}"
    yield from (f"{name}: {value}" for name, value in _licenses(record).items())
    yield from ("tags:", "- tgen", *(["- lora"] if record.adapter is not None else []), "---")


def _body(out: Path, record: RunRecord, reports: Iterable[RunReport]) -> Iterator[str]:
    plan, base, licenses = record.plan, _base(record), _licenses(record)
    how = "trained from scratch"
    if base is not None:
        how = f"fine-tuned from {_code(base)}{' as a LoRA adapter' if record.adapter else ''}"
    yield f"\n# {_plain(out.resolve().name)}\n"
    size = f"{n_parameters(plan.model) / 1e6:.2f} M parameters"
    yield f"A language model ({plan.model.family}, {size}), {how} with tgen {__version__}."
    yield "\n## Training text\n"
    names = ", ".join(_code(_without_folders(name)) for name in record.corpus)
    yield f"{names}: {record.corpus_bytes:,} bytes, of which {record.train_bytes:,} were trained on"
    yield f"and {record.held_out_bytes:,} were held out."
    if record.chat is not None:
        yield f"{count(record.chat.n_rows, 'conversation')}; only the answers were learned."
    yield "\n## Results\n"
    for report in reports:
        if isinstance(report, DoneReport):
            yield from _results(report)
        elif isinstance(report, MemorizationReport):
            yield f"- Memorization: {report.verdict}"
    yield "\n## Plan\n\n| | | |\n|---|---|---|"
    for choice in [record.tokenizer, *plan.choices]:
        cells = (choice.name, _without_folders(choice.value), choice.why)
        yield "| " + " | ".join(_plain(cell).replace("|", "\\|") for cell in cells) + " |"
    if record.command:
        command = shlex.join(["tgen", *map(_without_folders, record.command)])
        yield f"\n## Command\n\n```sh\n{' '.join(command.split())}\n```"
    yield "\n## License\n"
    if licenses:
        names = ", ".join(value.strip("\"'") for value in licenses.values())
        yield f"Inherited from {_code(base or '')}: {_plain(names)}."
    else:
        whose = "the training text" if base is None else f"{_code(base)} and the training text"
        yield f"Not stated. It depends on {whose}: add `license:` at the top of this file."


def _results(done: DoneReport) -> Iterator[str]:
    end = " (early stopping)" if done.stopped_early else ""
    end = " (every answer is reproduced by greedy decoding)" if done.learned else end
    yield f"- Training: {count(done.step, 'step')}, {done.tokens:,} tokens{end}"
    if not done.finished:
        yield "- The run was interrupted and can be resumed."
    if done.best_bits_per_byte is not None:
        yield f"- Held-out text: {done.best_bits_per_byte:.3f} bits per byte"
    for name, bits in done.baselines.items():
        yield f"- {name} on the same text: {bits:.3f} bits per byte"
    if done.general_before is not None and done.general_after is not None:
        before, after = done.general_before, done.general_after
        yield f"- General text: {before:.3f} bits per byte before, {after:.3f} after fine-tuning"


def _plain(text: str) -> str:
    """Return a text on one line, without markup."""
    return "".join(f"\\{c}" if c in "<[*_`" else c for c in " ".join(text.split()))


def _code(text: str) -> str:
    return f"`{' '.join(text.replace('`', '').split())}`"
