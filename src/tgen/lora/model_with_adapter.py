"""Models with an adapter: loaded with its changes added to their weights, and saved beside them.

The readers of adapters are imported when there is one: most models have none.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tgen.checkpoint import model_dir, model_files
from tgen.checkpoint.hf import generation_config
from tgen.checkpoint.inherited_settings import InheritedSettings
from tgen.checkpoint.model_dir import ModelBundle, changed_error, stored_dtype
from tgen.checkpoint.model_files import stamp_files
from tgen.checkpoint.stored_models import ADAPTER_CONFIG, ADAPTER_WEIGHTS, is_adapter
from tgen.config import ModelConfig
from tgen.storage import files
from tgen.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tgen.lora.matrices import Pair


def load(path: Path, *, adapter: Path | None = None) -> ModelBundle:
    """Load a model directory or a GGUF file, with an `adapter` merged into it if one is named; the
    directory of an adapter means its base model with it.

    Raises ModelError or TokenizerError.
    """
    if adapter is None and is_adapter(path):
        path, adapter = _base(path), path
    bundle = model_dir.load(path)
    return bundle if adapter is None else _with_adapter(bundle, adapter)


def reload(bundle: ModelBundle) -> ModelBundle:
    """Load the model again; raises ModelError if its files have changed."""
    again = load(bundle.path, adapter=bundle.adapter)
    if again.stamp != bundle.stamp:
        raise changed_error(bundle)
    return again


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer of a model, or of an adapter's base, without the weights.

    Raises ModelError or TokenizerError.
    """
    return model_dir.load_tokenizer(_base(path) if is_adapter(path) else path)


def settings_path(path: Path, adapter: Path | None) -> Path:
    """Return the directory with the chat template and the generation config of a model, or of an
    adapter."""
    if adapter is None and is_adapter(path):
        adapter, path = path, _base(path)
    return model_dir.settings_path(path, adapter)


def _base(adapter: Path) -> Path:
    from tgen.lora.adapter_base import find_base

    return find_base(adapter)


def _with_adapter(bundle: ModelBundle, path: Path) -> ModelBundle:
    from tgen.lora import adapter as adapters
    from tgen.lora.merging import merge_extras, merge_pairs

    adapter = adapters.read(path, bundle.config, model=bundle.path)
    warnings = adapters.check_base(adapter, bundle.path, bundle.arrays)
    merged = with_settings_of(bundle, path)
    if adapter.extras is not None:
        config, arrays = merge_extras(bundle.config, bundle.arrays, adapter.extras)
        if config.vocab_size != bundle.config.vocab_size and (path / "tokenizer.json").exists():
            ends = sorted(merged.end_ids)
            merged = replace(merged, tokenizer=model_dir.read_tokenizer(path, config, None, ends))
    else:
        config, arrays = bundle.config, merge_pairs(bundle.config, bundle.arrays, adapter.pairs)
    return replace(
        merged,
        config=config,
        arrays=arrays,
        base_dtype=stored_dtype(bundle),
        quantized=False,
        warnings=(*bundle.warnings, *warnings),
    )


def with_settings_of(bundle: ModelBundle, adapter: Path) -> ModelBundle:
    """Return a model with the chat template and the end tokens of an adapter, without its pairs."""
    ends = generation_config.read(adapter).end_ids or []
    return replace(
        bundle,
        adapter=adapter,
        stamp=bundle.stamp + stamp_files(model_files.adapter_files(adapter)),
        end_ids=bundle.end_ids | {i for i in ends if 0 <= i < bundle.config.vocab_size},
    )


def save(
    path: Path,
    config: ModelConfig,
    tokenizer: Tokenizer,
    pairs: "Mapping[str, Pair]",
    *,
    base: str,
    base_digest: str,
    alpha: float,
    inherited: InheritedSettings | None = None,
    is_new: bool = False,
) -> None:
    """Create the directory of an adapter, or replace what is in one, as `model_dir.save` does; it
    has the describing files of a model, but no config.json."""
    from tgen.lora import adapter as adapters

    contents: dict[str, files.Content] = {
        **model_dir.build_metadata_files(config, tokenizer, inherited=inherited)
    }
    del contents["config.json"]
    contents |= adapters.build_files(config, pairs, base=base, digest=base_digest, alpha=alpha)
    weights = contents.pop(ADAPTER_WEIGHTS)
    model_dir.publish_model(
        path, contents, ADAPTER_WEIGHTS, weights, main=ADAPTER_CONFIG, is_new=is_new
    )
