"""The model card of a run, from its record and its last reports."""

import json
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from tgen.checkpoint import model_card
from tgen.checkpoint.model_card import inline_code, plain_text
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
    return model_card.model_name(Path(record.start_from))


def _licenses(record: RunRecord) -> dict[str, str]:
    fields = model_card.read_fields(Path(record.start_from)) if record.start_from else {}
    return {name: value for name, value in fields.items() if name.startswith("license")}


def _front_matter(record: RunRecord) -> list[str]:
    base = _base(record)
    named = {} if base is None else {"base_model": json.dumps(base)}
    return model_card.front_matter(named | _licenses(record), is_adapter=record.adapter is not None)


def _body(out: Path, record: RunRecord, reports: Iterable[RunReport]) -> Iterator[str]:
    plan, base = record.plan, _base(record)
    how = "trained from scratch"
    if base is not None:
        how = f"fine-tuned from {inline_code(base)}{' as a LoRA adapter' if record.adapter else ''}"
    yield f"\n# {plain_text(out.resolve().name)}\n"
    size = f"{n_parameters(plan.model) / 1e6:.2f} M parameters"
    yield f"A language model ({plan.model.family}, {size}), {how} with tgen {__version__}."
    yield "\n## Training text\n"
    names = ", ".join(inline_code(_without_folders(name)) for name in record.corpus)
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
        yield "| " + " | ".join(plain_text(cell).replace("|", "\\|") for cell in cells) + " |"
    if record.command:
        words = (word for word in record.command if word != "--index")  # not part of the model
        command = shlex.join(["tgen", *map(_without_folders, words)])
        yield f"\n## Command\n\n```sh\n{' '.join(command.split())}\n```"
    source = inline_code(base or "")
    whose = "the training text" if base is None else f"{source} and the training text"
    yield from model_card.license_section(_licenses(record), source, depends_on=whose)


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
