"""What is replaced in PyTorch while a program is predicted, and put back afterwards.

Only what asks a GPU, or what fails because tensors have no memory. Nothing here decides about memory.
"""

import ctypes
import importlib
import importlib.util
import math
import os
import re
import sys
import sysconfig
import threading
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
import torch._subclasses.fake_tensor as fake_tensor
from torch._subclasses.fake_tensor import FakeTensor

from . import _cards, _cuda, _saved

_MISSING = object()


def hidden_files() -> Tuple[str, ...]:
    """Where files of PyTorch, of this package and of Python are: not the program's own."""
    torch_folder = str(Path(torch.__file__).parent) + os.sep
    return (torch_folder, str(Path(__file__).parent) + os.sep, sysconfig.get_path("stdlib") + "/runpy.py", "<frozen ")


class Patches:
    """Replaced attributes, put back in reverse order."""

    def __init__(self) -> None:
        self._undo: List[Callable[[], None]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        before = vars(owner).get(name, _MISSING) if isinstance(owner, type) else getattr(owner, name, _MISSING)
        setattr(owner, name, value)

        def undo() -> None:
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        self._undo.append(undo)

    def on_undo(self, function: Callable[[], None]) -> None:
        """Something else to put back."""
        self._undo.append(function)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()


# Autograd's engine asks the CUDA hooks whether a device has a context, which fails where there is no device. The hooks
# are an object of C++; it gets a table of virtual functions in which that one says no. The order of the functions is
# that of PyTorch's header, as the C++ ABI of Linux and macOS lays tables out.
_hooks: List[Any] = []


def answer_for_hooks() -> None:
    """Makes autograd work without a CUDA device, once per process; it stays."""
    if _hooks or _has_gpu():
        return
    torch._C._ensureCUDADeviceGuardSet()
    folder = Path(torch.__file__).parent
    library = next(
        (
            folder / "lib" / name
            for name in ("libtorch_cpu.so", "libtorch_cpu.dylib")
            if (folder / "lib" / name).exists()
        ),
        None,
    )
    names = _virtual_functions(folder / "include/ATen/detail/AcceleratorHooksInterface.h")
    cuda_names = _virtual_functions(folder / "include/ATen/detail/CUDAHooksInterface.h")
    if library is None or "hasPrimaryContext" not in names:
        return
    get = ctypes.CDLL(str(library))._ZN2at6detail12getCUDAHooksEv
    get.restype = ctypes.c_void_p
    table = ctypes.c_void_p.from_address(get())
    every = names + [name for name in cuda_names if name not in names]
    size = len(every) + 2
    words = (ctypes.c_void_p * (size + 2)).from_address(table.value - 2 * ctypes.sizeof(ctypes.c_void_p))
    copy = (ctypes.c_void_p * (size + 2))(*words)

    def replace(name: str, kind: Any, function: Any) -> None:
        callback = kind(function)
        _hooks.append(callback)
        # Before the first function are two words, and the destructor has two entries.
        copy[2 + 2 + every.index(name)] = ctypes.cast(callback, ctypes.c_void_p)

    asks_index = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int8)
    asks = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)
    replace("hasPrimaryContext", asks_index, lambda hooks, index: False)
    if torch.version.cuda is None:
        # Without CUDA, autograd must still take it for this process's accelerator.
        for name in ("isBuilt", "isAvailable", "hasCUDA"):
            if name in every:
                replace(name, asks, lambda hooks: True)
    _hooks.append(copy)
    table.value = ctypes.addressof(copy) + 2 * ctypes.sizeof(ctypes.c_void_p)


def _has_gpu() -> bool:
    count = getattr(torch._C, "_cuda_getDeviceCount", None)
    return count is not None and count() > 0


def _virtual_functions(header: Path) -> List[str]:
    """The virtual functions that a header declares, in order, without the destructor."""
    text = re.sub(r"//[^\n]*", "", header.read_text())
    found = re.findall(r"\bvirtual\s+[\w:&<>*\s]*?[\s&*](\w+)\s*\(", text)
    return found


def patch(patches: Patches, recorder: Any, card: _cards.Card, devices: int, worker: Any) -> None:
    """Replaces everything; `patches.undo()` puts it back."""
    _patch_cuda(patches, recorder, card, devices)
    _patch_tensors(patches, recorder)
    _patch_modules(patches, recorder)
    _patch_functions(patches, recorder, card)
    _patch_data(patches, recorder, worker)
    _patch_script(patches, recorder)
    _patch_threads(patches, recorder)


def _patch_cuda(patches: Patches, recorder: Any, card: _cards.Card, devices: int) -> None:
    made = _cuda.functions(recorder, card, devices)
    cuda, memory = torch.cuda, torch.cuda.memory
    for name, value in made["cuda"].items():
        patches.set(cuda, name, value)
    for name, value in made["memory"].items():
        patches.set(memory, name, value)
        if hasattr(cuda, name):
            patches.set(cuda, name, value)
    for name in (
        "get_rng_state",
        "set_rng_state",
        "get_rng_state_all",
        "set_rng_state_all",
        "manual_seed",
        "manual_seed_all",
        "seed",
        "seed_all",
        "initial_seed",
    ):
        patches.set(cuda.random, name, made["cuda"][name])
    for name in ("Stream", "Event"):
        patches.set(cuda.streams, name, made["cuda"][name])
        # Those of any device; the host has none.
        patches.set(torch, name, made["cuda"][name])
    patches.set(torch._C, "_cuda_clearCublasWorkspaces", recorder.free_kept)
    patches.set(torch._C, "_cuda_getDeviceCount", lambda: devices)
    patches.set(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
    patches.set(torch._C, "_cuda_getCurrentRawStream", lambda index: recorder.streams.current(index))
    if hasattr(torch._C, "_get_accelerator"):
        patches.set(torch._C, "_get_accelerator", lambda *_: torch.device("cuda"))
    patches.set(torch._C, "_cuda_emptyCache", made["memory"]["empty_cache"])
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is not None:
        for name, value in {
            "is_available": lambda: True,
            "device_count": lambda: devices,
            "current_accelerator": lambda check_available=False: torch.device("cuda"),
            "current_device_index": lambda: recorder.streams.device,
            "current_device_idx": lambda: recorder.streams.device,
            "set_device_index": made["cuda"]["set_device"],
            "set_device_idx": made["cuda"]["set_device"],
            "current_stream": made["cuda"]["current_stream"],
            "set_stream": made["cuda"]["set_stream"],
            "synchronize": made["cuda"]["synchronize"],
            **{
                name: made["memory"][name]
                for name in (
                    "empty_cache",
                    "memory_allocated",
                    "max_memory_allocated",
                    "memory_reserved",
                    "max_memory_reserved",
                    "memory_stats",
                    "reset_peak_memory_stats",
                )
            },
        }.items():
            if hasattr(accelerator, name):
                patches.set(accelerator, name, value)
    patches.set(torch, "Generator", _cuda.FakeGenerator)
    patches.set(fake_tensor, "init_gpu_context", lambda device=None: None)
    # Transformers asks for it, and takes a model for traced: then it makes masks that it leaves out otherwise.
    patches.set(torch._subclasses, "FakeTensor", type("FakeTensor", (), {}))
    patches.set(fake_tensor.FakeTensorMode, "avoid_device_init", property(lambda mode: True))


def _patch_tensors(patches: Patches, recorder: Any) -> None:
    values, assumptions = recorder.values, recorder.assumptions

    def fake_of(tensor: torch.Tensor, keep: int = 0) -> Any:
        """A tensor of the host without its memory."""
        with recorder.fake:
            made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        if tensor.numel() <= keep:
            values.set(made, tensor.detach())
        return made

    def set_data(tensor: Any, data: Any) -> None:
        if not isinstance(data, FakeTensor):
            data = fake_of(data, 16)
        _DATA.__set__(tensor, data)
        tensor.fake_device = data.fake_device

    def record_stream(tensor: Any, stream: Any) -> None:
        block = recorder.block(tensor)
        if block is not None:
            recorder.log.use(block, stream.stream_id)

    def read(tensor: Any) -> torch.Tensor:
        """The elements of a tensor that are read: the values, or what is assumed, once for all elements."""
        known = values.of(tensor)
        if known is None:
            if not tensor.dtype.is_floating_point:
                raise assumptions.missing("the elements of a tensor are read")
            one = torch.tensor(assumptions.item(tensor), dtype=tensor.dtype)
            return one.expand(tuple(tensor.shape))
        taint = values.taint(tensor)
        if taint is not None:
            assumptions.add(taint)
        return known

    def numpy(tensor: Any, **_: Any) -> Any:
        if tensor.dtype in (torch.uint8, torch.bool) and tensor.dim() > 1 and values.of(tensor) is None:
            found = assumptions.picture(tensor).numpy()
        else:
            found = read(tensor).numpy()
        # The program may write to it; of more than this it has a view of one element.
        return found.copy() if 0 in found.strides and found.nbytes <= 64 << 20 else found

    def tolist(tensor: Any) -> Any:
        if tensor.fake_device.type == "cuda":
            recorder.log.synchronize()
        return read(tensor).tolist()

    def shown(tensor: Any, **_: Any) -> str:
        """What is printed: the values, or that there are none. PyTorch's own way would compute with them."""
        known = None if tensor.is_sparse else values.of(tensor)
        parts = ["..." if known is None else repr(known.detach())[7:-1]]
        if known is None:
            parts.append(f"size={tuple(tensor.shape)}, dtype={tensor.dtype}")
        if tensor.fake_device.type == "cuda":
            parts.append(f"device='{tensor.fake_device}'")
        if tensor.grad_fn is not None:
            parts.append(f"grad_fn=<{tensor.grad_fn.name()}>")
        elif tensor.requires_grad:
            parts.append("requires_grad=True")
        if tensor.fake_device.type == "cuda":
            recorder.log.synchronize()
        text = f"tensor({', '.join(parts)})"
        return f"Parameter containing:\n{text}" if getattr(tensor, "_is_param", False) else text

    def deepcopy(tensor: Any, memo: Dict[int, Any]) -> Any:
        if id(tensor) in memo:
            return memo[id(tensor)]
        with torch.no_grad():
            made = tensor.detach().clone()
        made.requires_grad_(tensor.requires_grad)
        if getattr(tensor, "_is_param", False):
            made._is_param = True
        made.__dict__.update(
            {
                name: value
                for name, value in tensor.__dict__.items()
                if name not in made.__dict__ and name != "_is_param"
            }
        )
        if tensor.grad is not None:
            made.grad = tensor.grad.clone()
        memo[id(tensor)] = made
        return made

    def text_of(tensor: Any, spec: str) -> str:
        return format(tensor.item(), spec) if tensor.dim() == 0 else object.__format__(tensor, spec)

    def new_parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if (
            cls is torch.nn.Parameter
            and type(data) in (torch.Tensor, torch.nn.Parameter)
            and data.device.type == "cpu"
        ):
            data = fake_of(data, 16)
        return _NEW_PARAMETER(cls, data, requires_grad)

    def cuda(tensor: Any, device: Any = None, non_blocking: bool = False, memory_format: Any = None) -> Any:
        index = recorder.streams.device if device is None else _cuda._index(device, recorder.streams.device)
        options = {} if memory_format is None else {"memory_format": memory_format}
        return tensor.to(torch.device("cuda", index), non_blocking=non_blocking, **options)

    def pin_memory(tensor: Any, device: Any = None) -> Any:
        recorder.host_bytes += tensor.untyped_storage().nbytes()
        made = tensor.detach().clone()
        recorder.pinned.add(made.untyped_storage()._cdata)
        return made

    def is_pinned(tensor: Any, device: Any = None) -> bool:
        return tensor.untyped_storage()._cdata in recorder.pinned

    def data_ptr(tensor: Any) -> int:
        if isinstance(tensor, FakeTensor):
            return (tensor.untyped_storage()._cdata << 8) + tensor.storage_offset() * tensor.element_size()
        return _DATA_PTR(tensor)

    patches.set(FakeTensor, "data", property(_DATA.__get__, set_data))
    patches.set(FakeTensor, "record_stream", record_stream)
    patches.set(FakeTensor, "numpy", numpy)
    patches.set(FakeTensor, "__array__", lambda tensor, dtype=None, copy=None: numpy(tensor))
    patches.set(FakeTensor, "tolist", tolist)
    patches.set(FakeTensor, "__deepcopy__", deepcopy)
    patches.set(FakeTensor, "__format__", text_of)
    patches.set(FakeTensor, "__repr__", shown)
    patches.set(FakeTensor, "data_ptr", data_ptr)
    patches.set(torch.Tensor, "cuda", cuda)
    patches.set(torch.Tensor, "pin_memory", pin_memory)
    patches.set(torch.Tensor, "is_pinned", is_pinned)
    patches.set(torch.nn.Parameter, "__new__", staticmethod(new_parameter))
    recorder.pinned = set()
    recorder.fake_of = fake_of


_DATA: Any = torch.Tensor.data
_DATA_PTR: Any = torch.Tensor.data_ptr
_NEW_PARAMETER: Any = torch.nn.Parameter.__new__


def _patch_modules(patches: Patches, recorder: Any) -> None:
    def apply(module: Any, fn: Any, recurse: bool = True) -> Any:
        """`Module._apply`: parameters stay the objects that they are, as with tensors that have memory."""
        if recurse:
            for child in module.children():
                apply_to = type(child)._apply
                apply_to(child, fn)
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            with torch.no_grad():
                moved = fn(parameter)
            if isinstance(parameter, FakeTensor):
                if moved is not parameter:
                    parameter.data = moved
            elif moved is not parameter:
                module._parameters[key] = torch.nn.Parameter(moved, parameter.requires_grad)
            if parameter.grad is not None:
                with torch.no_grad():
                    gradient = fn(parameter.grad)
                if gradient is not parameter.grad:
                    parameter.grad.data = gradient
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = fn(buffer)
        return module

    # In stacks it is what it stands for, by which kinds of memory are told.
    before = torch.nn.Module._apply.__code__
    apply.__code__ = apply.__code__.replace(
        co_filename=before.co_filename, co_name="_apply", co_firstlineno=before.co_firstlineno
    )
    patches.set(torch.nn.Module, "_apply", apply)
    for module in (
        importlib.import_module("torch.optim.optimizer"),
        importlib.import_module("torch.utils._foreach_utils"),
    ):
        patches.set(
            module, "_foreach_supported_types", [*module._foreach_supported_types, FakeTensor, torch.nn.Parameter]
        )
    patches.set(torch.nn.RNNBase, "flatten_parameters", _flatten_parameters(recorder))


def _flatten_parameters(recorder: Any) -> Any:
    def flatten(module: Any) -> None:
        """cuDNN's weights are one buffer, of which the parameters are views."""
        weights = [weight for weight in module._flat_weights if isinstance(weight, torch.Tensor)]
        if not weights or any(
            not isinstance(weight, FakeTensor) or weight.fake_device.type != "cuda" for weight in weights
        ):
            return
        storages = {weight.untyped_storage()._cdata for weight in weights}
        if len(storages) == 1:
            return
        with torch.no_grad():
            total = sum(weight.numel() for weight in weights)
            buffer = torch.empty(total, dtype=weights[0].dtype, device=weights[0].device)
            offset = 0
            for weight in weights:
                weight.data = buffer.as_strided(weight.size(), weight.stride(), offset)
                offset += weight.numel()

    return flatten


def _patch_functions(patches: Patches, recorder: Any, card: _cards.Card) -> None:
    from ._attention import attention
    from ._recurrent import recurrent

    original = torch._C._nn.scaled_dot_product_attention
    replaced = attention(recorder, card, original)
    patches.set(torch._C._nn, "scaled_dot_product_attention", replaced)
    patches.set(torch.nn.functional, "scaled_dot_product_attention", replaced)
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        patches.set(torch._VF, name, recurrent(name, getattr(torch._VF, name)))
        patches.set(torch, name, getattr(torch._VF, name))

    ctc = torch.ctc_loss

    def ctc_loss(
        log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *rest: Any, **more: Any
    ) -> Any:
        """PyTorch takes another way for tensors of other classes than its own."""
        known = []
        for lengths in (input_lengths, target_lengths):
            values = recorder.values.of(lengths) if isinstance(lengths, torch.Tensor) else lengths
            if values is None:
                raise recorder.assumptions.missing("lengths of sequences are read")
            known.append([int(each) for each in values])
        return ctc(log_probs, targets, *known, *rest, **more)

    patches.set(torch, "ctc_loss", ctc_loss)

    def fast_path() -> bool:
        if not torch.is_grad_enabled():
            recorder.remarks.add("the fast path of nn.TransformerEncoder and nn.MultiheadAttention was left out")
        return False

    patches.set(torch.backends.mha, "get_fastpath_enabled", fast_path)
    resize = torch.UntypedStorage.resize_

    def resize_storage(storage: Any, size: int) -> Any:
        result = resize(storage, size)
        recorder.resized(storage, int(size))
        return result

    data_ptr = torch.UntypedStorage.data_ptr

    def storage_data_ptr(storage: Any) -> int:
        """Distinct for each storage: what is saved is compared by it."""
        return storage._cdata << 8 if storage.device.type == "meta" else data_ptr(storage)

    patches.set(torch.UntypedStorage, "resize_", resize_storage)
    patches.set(torch.UntypedStorage, "data_ptr", storage_data_ptr)
    if torch.distributed.is_available():
        # It compares the shapes of parameters among ranks, by their values.
        distributed = importlib.import_module("torch.nn.parallel.distributed")
        from . import _ddp

        patches.set(torch.distributed, "Reducer", _ddp.Reducer)
        patches.set(torch.distributed, "Logger", _ddp.Logger)
        patches.set(distributed, "_verify_param_shape_across_processes", lambda *_, **__: True)

    _saved.patch(patches, recorder)
    replicas = torch.nn.DataParallel.__init__

    def one_replica(module: Any, *args: Any, **options: Any) -> None:
        replicas(module, *args, **options)
        if len(getattr(module, "device_ids", ())) > 1:
            line = recorder.assumptions.given()[1]
            raise recorder.assumptions_error(
                f"{line}: DataParallel over several GPUs is not predicted: use DistributedDataParallel and "
                "--world-size, or give it one GPU"
            )

    patches.set(torch.nn.DataParallel, "__init__", one_replica)

    def compile(model: Any = None, **options: Any) -> Any:
        recorder.remarks.add(
            "torch.compile was left out: the program ran eagerly, and compiled code may need less memory, or more"
        )
        return (lambda function: function) if model is None else model

    for name in (
        "sparse_coo_tensor",
        "sparse_csr_tensor",
        "sparse_csc_tensor",
        "sparse_bsr_tensor",
        "sparse_bsc_tensor",
        "sparse_compressed_tensor",
    ):
        patches.set(torch, name, _without_sparse(recorder, name, getattr(torch, name)))
    for name in ("to_sparse", "to_sparse_coo", "to_sparse_csr"):
        patches.set(torch.Tensor, name, _without_sparse(recorder, name, getattr(torch.Tensor, name)))
    patches.set(torch, "compile", compile)
    patches.set(torch.nn.Module, "compile", lambda module, *_, **__: compile(module) and None)
    for name in ("nested_tensor", "as_nested_tensor", "nested_tensor_from_jagged"):
        patches.set(torch.nested, name, _refused(recorder, f"nested tensors ({name}) are not predicted: pad them"))
    _patch_profiler(patches, recorder)
    _patch_triton(patches, recorder)


def _refused(recorder: Any, text: str) -> Any:
    def refuse(*_: Any, **__: Any) -> Any:
        raise recorder.assumptions_error(f"{recorder.assumptions.given()[1]}: {text}")

    return refuse


def _patch_profiler(patches: Patches, recorder: Any) -> None:
    """A profiler asks CUDA for the times of kernels: here it sees the host only."""
    profile = torch.autograd.profiler.profile
    init = profile.__init__

    def init_on_host(profiler: Any, enabled: bool = True, **options: Any) -> None:
        recorder.remarks.add("torch.profiler saw the host only")
        init(profiler, enabled, **{**options, "use_cuda": False, "use_device": None, "use_cpu": True})

    patches.set(profile, "__init__", init_on_host)


def _patch_script(patches: Patches, recorder: Any) -> None:
    """TorchScript runs eagerly: PyTorch's own switch for that. What was compiled before is not fused, for which its
    interpreter would need a driver."""
    state = importlib.import_module("torch.jit._state")._enabled
    patches.set(state, "enabled", False)
    fuses = torch._C._jit_texpr_fuser_enabled()
    torch._C._jit_set_texpr_fuser_enabled(False)
    patches.on_undo(lambda: torch._C._jit_set_texpr_fuser_enabled(fuses))

    def unchanged(original: Any) -> Any:
        def left_out(*args: Any, **options: Any) -> Any:
            # Not where PyTorch compiles functions of its own, such as at the import of torch.distributed.optim.
            if not sys._getframe(1).f_code.co_filename.startswith(hidden_files()[0]):
                recorder.remarks.add("TorchScript was left out: the program ran eagerly")
            return original(*args, **options)

        return left_out

    for name in ("script", "trace"):
        patches.set(torch.jit, name, unchanged(getattr(torch.jit, name)))
    for name in ("freeze", "optimize_for_inference"):
        patches.set(torch.jit, name, unchanged(lambda module, *_, **__: module))


def _patch_threads(patches: Patches, recorder: Any) -> None:
    """A thread that the program starts is predicted too: modes of operators are of one thread."""
    run = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def run_predicted(thread: threading.Thread) -> None:
        with recorder.in_thread():
            run(thread)

    patches.set(threading.Thread, "_bootstrap_inner", run_predicted)


def _patch_triton(patches: Patches, recorder: Any) -> None:
    """Triton's kernels take no memory but that of the tensors which they are given, which they may write."""
    if importlib.util.find_spec("triton") is None:
        return
    jit = importlib.import_module("triton.runtime.jit")
    autotuner = importlib.import_module("triton.runtime.autotuner")

    def run(kernel: Any, *args: Any, **options: Any) -> None:
        recorder.remarks.add("Triton's kernels were left out: they allocate nothing themselves")
        recorder.outside.kernels = True
        for each in (*args, *options.values()):
            recorder.values.forget_one(each)

    for owner in (jit.JITFunction, autotuner.Autotuner):
        patches.set(owner, "run", run)


def _without_sparse(recorder: Any, name: str, original: Any) -> Any:
    """Sparse tensors of a device are not predicted: their sizes depend on values."""

    def make(*args: Any, **options: Any) -> Any:
        every = (*args, options.get("device", "cpu"))
        if any(
            each.is_cuda
            if isinstance(each, torch.Tensor)
            else isinstance(each, (str, torch.device)) and torch.device(each).type == "cuda"
            for each in every
        ):
            line = recorder.assumptions.given()[1]
            raise recorder.assumptions_error(f"{line}: sparse CUDA tensors ({name}) are not predicted")
        return original(*args, **options)

    return make


def _patch_data(patches: Patches, recorder: Any, worker: Any) -> None:
    """Loaders: their workers run without a prediction, and there is no thread that pins memory."""
    from torch.utils.data import _utils, dataloader

    loop = _utils.worker._worker_loop

    def worker_loop(*args: Any, **kwargs: Any) -> Any:
        worker()
        return loop(*args, **kwargs)

    patches.set(_utils.worker, "_worker_loop", worker_loop)
    init = dataloader.DataLoader.__init__

    def loader_init(loader: Any, *args: Any, **kwargs: Any) -> None:
        init(loader, *args, **kwargs)
        if loader.pin_memory:
            # A batch is pinned where it is taken, by `_BaseDataLoaderIter.__next__` below.
            object.__setattr__(loader, "_pinned_by_prediction", True)
            object.__setattr__(loader, "pin_memory", False)

    iterate = dataloader._BaseDataLoaderIter.__next__

    def next_batch(iterator: Any) -> Any:
        return iterate(iterator)

    patches.set(dataloader.DataLoader, "__init__", loader_init)
    patches.set(dataloader._BaseDataLoaderIter, "__next__", next_batch)
