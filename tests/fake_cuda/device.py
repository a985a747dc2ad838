"""A CUDA device that computes on the CPU, and a record of where tgen waits for it.

A `CudaTensor` wraps the CPU tensor with its numbers. For torch and for tgen its device is `cuda:0`.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._decomp import decompositions
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import tgen

GPU = torch.device("cuda", 0)
_SOURCE = str(Path(tgen.__file__).parent)
_ATEN = torch.ops.aten
_GPU_ONLY = {  # used where torch is built for CUDA
    _ATEN._fused_rms_norm_backward.default: decompositions._fused_rms_norm_backward,
}
_INDEXING = {_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default}


class CudaTensor(Tensor):
    """A tensor on the device."""

    numbers: Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, numbers: Tensor) -> "CudaTensor":
        inference = torch.is_inference_mode_enabled()  # where no other tensor has views
        with torch.inference_mode(False) if inference else nullcontext():
            tensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls,
                numbers.shape,
                numbers.stride(),
                numbers.storage_offset(),
                dtype=numbers.dtype,
                device=GPU,
            )
        tensor.numbers = numbers
        return tensor  # type: ignore[no-any-return]

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, *call: Any) -> Any:
        raise AssertionError("used outside of `Device`")


class Graph:
    """A CUDA graph: operations that are repeated on the same memory."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, list[Any], dict[str, Any], Any]] = []

    def replay(self) -> None:
        """Compute the results of all operations again."""
        with _disable_current_modes():
            for func, args, kwargs, results in self.calls:
                new_results = func(*args, **kwargs)
                for old, new in zip(_tensors([results]), _tensors([new_results]), strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)


class Device(TorchDispatchMode):
    """Compute with the numbers of CudaTensors; count the operations that wait for the GPU, by their
    name and the function of tgen.

    An operation on tensors of both devices raises RuntimeError, as it does on a GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self._graph: Graph | None = None  # being captured

    def wait(self, name: str) -> None:
        """Count a wait, which is an error while a graph is captured."""
        captured = "captured " if self._graph is not None else ""
        self.waits[f"{captured}{name} in {_function_of_tgen()}"] += 1

    @contextmanager
    def capture(self, graph: Graph) -> Iterator[None]:
        """Add the operations of this context to the graph."""
        self._graph = graph
        yield
        self._graph = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled; to skip it, torch imports it

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if _is_composite(func):  # in inference mode
            with self:
                return func.decompose(*args, **kwargs)
        tensors = list(_tensors([*args, *kwargs.values()]))
        on_gpu = [x for x in tensors if isinstance(x, CudaTensor)]
        to_gpu = bool(on_gpu)
        if kwargs.get("device") is not None:
            to_gpu = kwargs["device"].type == "cuda"
            kwargs = kwargs | {"device": torch.device("cpu")} if to_gpu else kwargs
        if func is _ATEN._to_copy.default:
            self._copy(args[0], to_gpu, kwargs.get("non_blocking", False))
        elif func is _ATEN.copy_.default:
            to_gpu = isinstance(args[0], CudaTensor)
            self._copy(args[1], to_gpu, args[2] if len(args) > 2 else False)
        elif on_gpu:
            if any(x.ndim and not isinstance(x, CudaTensor) for x in tensors):
                raise RuntimeError(f"{func} got tensors of a CPU and a GPU")
            if _reads_numbers(func, args):
                self.wait(func.overloadpacket.__name__)
        args = _numbers(args)
        kwargs = {name: _numbers(value) for name, value in kwargs.items()}
        result = _GPU_ONLY.get(func, func)(*args, **kwargs)
        if not to_gpu:
            return result
        if self._graph is not None:
            self._graph.calls.append((func, args, kwargs, result))
        return _wrap(result, {id(x.numbers): x for x in on_gpu})

    def _copy(self, source: Tensor, to_gpu: bool, non_blocking: bool) -> None:
        from_gpu = isinstance(source, CudaTensor)
        if from_gpu and not to_gpu:
            self.wait("copy to the CPU")
        elif to_gpu and not from_gpu and not (non_blocking and hasattr(source, "is_pinned_here")):
            self.wait("copy to the GPU")


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _numbers(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_numbers(one) for one in value]
    return value.numbers if isinstance(value, CudaTensor) else value


def _wrap(value: Any, known: dict[int, CudaTensor]) -> Any:
    """Return CudaTensors; the `known` ones if they were changed in place."""
    if isinstance(value, list | tuple):
        return type(value)(_wrap(one, known) for one in value)
    if not isinstance(value, Tensor):
        return value
    return known[id(value)] if id(value) in known else CudaTensor(value)


def _reads_numbers(func: Any, args: Any) -> bool:
    """Whether the CPU must know numbers of the GPU, such as those of a mask that is an index."""
    if func in _INDEXING:
        return any(x is not None and x.dtype == torch.bool for x in args[1])
    return _is_dynamic(func)


@cache
def _is_dynamic(func: Any) -> bool:
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*func.tags})


@cache
def _is_composite(func: Any) -> bool:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def _function_of_tgen() -> str:
    frame: Any = sys._getframe()
    while frame and not frame.f_code.co_filename.startswith(_SOURCE):
        frame = frame.f_back
    if frame is None:
        return "no function of tgen"
    name = frame.f_code.co_qualname.partition(".<locals>")[0]
    return f"{Path(frame.f_code.co_filename).stem}.{name}"


def _pin_memory(tensor: Tensor) -> Tensor:
    pinned = tensor.clone()
    pinned.is_pinned_here = True  # type: ignore[attr-defined]
    return pinned


@contextmanager
def fake_gpu() -> Iterator[Device]:
    """Let torch have a GPU that computes bfloat16; yield it."""
    device = Device()

    def synchronize(_: object = None) -> None:
        device.wait("synchronize")

    stream = mock.Mock(return_value=mock.Mock(synchronize=synchronize))
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
        patch.setattr("torch.cuda.is_bf16_supported", lambda: True)
        patch.setattr("torch.cuda._lazy_init", lambda: None)
        patch.setattr("torch.manual_seed", torch.default_generator.manual_seed)  # notes no calls
        # A module that moves gets new parameters: the memory of the old ones cannot move.
        patch.setattr("torch._has_compatible_shallow_copy_type", lambda *_: False)
        patch.setattr(Tensor, "pin_memory", _pin_memory)
        patch.setattr("torch.cuda.synchronize", synchronize)
        patch.setattr("torch.accelerator.synchronize", synchronize)
        patch.setattr("torch.cuda.Stream", stream)
        patch.setattr("torch.cuda.current_stream", stream)
        patch.setattr("torch.cuda.stream", nullcontext)
        patch.setattr("torch.cuda.CUDAGraph", Graph)
        patch.setattr("torch.cuda.graph", device.capture)
        # Arrays become CPU tensors before they are copied.
        stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        yield stack.enter_context(device)
