"""tgen: train a small language model on your own text, generate, look inside, measure."""

TYPE_CHECKING = False  # as typing has it, which takes longer to import than a Ctrl-C to come

__version__ = "0.1.0"
__all__ = ["Model", "ModelConfig", "SamplingConfig", "TgenError", "TrainConfig", "load"]

if TYPE_CHECKING:
    from tgen.api import Model, load
    from tgen.config import ModelConfig, SamplingConfig, TrainConfig
    from tgen.errors import TgenError

_HOMES = {
    "Model": "api",
    "load": "api",
    "ModelConfig": "config",
    "SamplingConfig": "config",
    "TrainConfig": "config",
    "TgenError": "errors",
}


def __getattr__(name: str) -> object:
    """Public names are imported when first used, so that `import tgen` costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'tgen' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"tgen.{_HOMES[name]}"), name)
