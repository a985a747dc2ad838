"""Where the next token's logits come from."""

from tgen.checkpoint.directory import ModelBundle
from tgen.engine.base import Engine


def open_engine(
    bundle: ModelBundle,
    *,
    device: str = "auto",
    threads: int | None = None,
) -> Engine:
    """An engine, with one empty row, that runs this model on `device`.

    Raises UsageError if the device is not there.
    """
    from tgen.engine.torch_engine import TorchEngine  # torch is loaded only when it is needed
    from tgen.model.device import choose_device, set_threads
    from tgen.model.transformer import Transformer

    set_threads(threads)
    model = Transformer.from_arrays(bundle.config, bundle.arrays)
    return TorchEngine(model.to(choose_device(device)))
