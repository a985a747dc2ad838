"""A run's numbers as TensorBoard's events, for those who want its curves in a browser.

Needs the package tensorboardX, which writes the format without TensorBoard or TensorFlow.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from tgen.errors import UsageError
from tgen.reports import EvalReport, RunReport, SampleReport, StepReport


def require() -> None:
    """Raises UsageError if the package is missing; to be asked before anything is trained."""
    if find_spec("tensorboardX") is None:
        raise UsageError(
            "--tensorboard needs the package tensorboardX", "pip install 'tgen-lm[tensorboard]'"
        )


def recorded(reports: Iterator[RunReport], folder: Path, *, after_step: int) -> Iterator[RunReport]:
    """Hands on every report, after its numbers are events in `folder`.

    What an earlier sitting wrote there of steps after `after_step` is no longer shown.
    """
    require()
    from tensorboardX import SummaryWriter

    # A file's name has the second in it: the step keeps a quick resumption from overwriting one.
    suffix = f".after-{after_step}"
    with SummaryWriter(str(folder), purge_step=after_step + 1, filename_suffix=suffix) as writer:
        for report in reports:
            if isinstance(report, StepReport):
                if report.loss is not None:
                    writer.add_scalar("loss/train", report.loss, report.step)
                writer.add_scalar("learning_rate", report.learning_rate, report.step)
                writer.add_scalar("tokens_per_second", report.tokens_per_second, report.step)
            elif isinstance(report, EvalReport):
                writer.add_scalar("loss/validation", report.loss, report.step)
                writer.add_scalar("bits_per_byte/validation", report.bits_per_byte, report.step)
            elif isinstance(report, SampleReport):
                writer.add_text("sample", _verbatim(report), report.step)
            if not isinstance(report, StepReport):  # a state has been saved
                writer.flush()
            yield report


def _verbatim(sample: SampleReport) -> str:
    """The sample as a block of code in Markdown, which TensorBoard draws texts in."""
    text = (sample.prompt + sample.text).decode(errors="replace")
    return "".join(f"    {line}\n" for line in text.splitlines())
