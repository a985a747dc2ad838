"""tgen: train a small language model on your own text, generate from it, inspect, measure it."""

from tgen.version import __version__ as __version__

TYPE_CHECKING = False  # as in typing, whose import would take longer than a Ctrl-C may wait

__all__ = [
    "Model",
    "ModelConfig",
    "SamplingConfig",
    "Stream",
    "Text",
    "TgenError",
    "TrainConfig",
    "load",
    "train",
]

if TYPE_CHECKING:
    from tgen.config import ModelConfig, SamplingConfig
    from tgen.config.training import TrainConfig
    from tgen.errors import TgenError
    from tgen.python_api import Model, Stream, load, train
    from tgen.reports.generation import Text

_HOMES = {
    "Model": "python_api",
    "load": "python_api",
    "train": "python_api",
    "Stream": "python_api",
    "ModelConfig": "config",
    "SamplingConfig": "config",
    "TrainConfig": "config.training",
    "TgenError": "errors",
    "Text": "reports.generation",
}


def __getattr__(name: str) -> object:
    """Import public names on first use, so that `import tgen` is fast."""
    if name not in _HOMES:
        raise AttributeError(f"module 'tgen' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"tgen.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """Return all names, also those that are not imported yet."""
    return sorted({*globals(), *__all__})
