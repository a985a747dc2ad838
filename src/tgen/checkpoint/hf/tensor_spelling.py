"""Other spellings of transformers' tensor names: wrapped modules, models with images, old files."""

from collections.abc import Collection

# Modules that hold a whole model: DistributedDataParallel's, and that of torch.compile.
_WRAPPERS = ("module.", "_orig_mod.")
# The language model inside a model with images, in version 5 of transformers and before.
_TEXT_PARTS = {"model.language_model.": "model.", "language_model.": ""}
_OLD_ENDINGS = {".gamma": ".weight", ".beta": ".bias"}


def plain_names(names: Collection[str]) -> dict[str, str]:
    """Return the usual name of each tensor by its name in a file; of a model with images, those of
    its language model alone."""
    plain = dict(zip(names, names, strict=True))
    while prefix := _shared_prefix(plain.values()):
        plain = {name: usual.removeprefix(prefix) for name, usual in plain.items()}
    parts = {
        name: _TEXT_PARTS[prefix] + usual.removeprefix(prefix)
        for name, usual in plain.items()
        if (prefix := next((p for p in _TEXT_PARTS if usual.startswith(p)), None))
    }
    if parts:
        head = {name: usual for name, usual in plain.items() if usual == "lm_head.weight"}
        plain = head | parts
    for old, new in _OLD_ENDINGS.items():
        plain = {
            name: usual.removesuffix(old) + new if usual.endswith(old) else usual
            for name, usual in plain.items()
        }
    return plain


def _shared_prefix(names: Collection[str]) -> str | None:
    return next((p for p in _WRAPPERS if names and all(n.startswith(p) for n in names)), None)
