"""Memory that others register, with PyTorch and NCCL, one rank on one GPU: `python registered.py [--json] [--conf
CONF]`. Needs a GPU, PyTorch with NCCL, and Warpool (the repository, or installed). Less than two minutes.

With `backend:native` and `backend:paged` in turn, each in a process of its own: what a segment of a stable pool is in
the driver (one allocation, its alignment, for RDMA, exportable, as a dma-buf); that it stays where it is while the rest
of the GPU's memory comes and goes; NCCL's registration of it, by `ncclCommRegister`, as a window, and by PyTorch's
`register_mem_pool` for a stable pool, an ordinary one and one over `ncclMemAlloc`; PyTorch's symmetric memory. One line
per check: `ok`, `FAILED`, or `note` where the machine or a world of one rank does not allow it. Exit status 1 if
anything failed. The last lines list what needs a second GPU.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

CONFS = ("backend:native", "backend:paged")
MIB = 1 << 20
TIMEOUT_S = 55

NEEDS_TWO_GPUS = (
    "multicast objects that bind a stable segment (NVLS)",
    "peer access to segments mapped before and after, and copies between devices",
    "ncclCommRegister and windows with more than one rank, whose buffers peers map",
    "symmetric memory that another rank writes",
    "a network card that registers the dma-buf",
)

_FLOAT32, _SUM, _SYMMETRIC_WINDOW = 7, 0, 1
_DMA_BUF_SUPPORTED, _MULTICAST_SUPPORTED = 124, 132
_POSIX_FD, _DMA_BUF_FD = 1, 1


class NotHere(Exception):
    """The machine, or a world of one rank, does not allow the check."""


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("location_id", ctypes.c_int),
        ("win32", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class _Multicast(ctypes.Structure):
    """CUmulticastObjectProp."""

    _fields_ = [
        ("devices", ctypes.c_uint),
        ("size", ctypes.c_size_t),
        ("handle_types", ctypes.c_ulonglong),
        ("flags", ctypes.c_ulonglong),
    ]


class Cuda:
    """The driver, for what PyTorch does not tell."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise RuntimeError(f"{name} returned {code}")

    def attribute(self, which: int) -> int:
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), which, 0)
        return value.value

    def range_of(self, ptr: int) -> Tuple[int, int]:
        """The driver's allocation or mapping at an address."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self.call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(ptr))
        return base.value, size.value

    def physical(self, ptr: int) -> Tuple[_Properties, int]:
        """How the physical memory at an address was created, and a descriptor that it was exported to."""
        handle, properties, descriptor = ctypes.c_uint64(), _Properties(), ctypes.c_int(-1)
        self.call("cuMemRetainAllocationHandle", ctypes.byref(handle), ctypes.c_void_p(ptr))
        try:
            self.call("cuMemGetAllocationPropertiesFromHandle", ctypes.byref(properties), handle)
            self.call("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, _POSIX_FD, ctypes.c_uint64(0))
        finally:
            self.call("cuMemRelease", handle)
        return properties, descriptor.value

    def dma_buf(self, ptr: int, size: int) -> int:
        if not self.attribute(_DMA_BUF_SUPPORTED):
            raise NotHere("the driver exports no dma-bufs here")
        descriptor = ctypes.c_int(-1)
        name = "cuMemGetHandleForAddressRange"
        arguments = (ctypes.c_uint64(ptr), ctypes.c_size_t(size), _DMA_BUF_FD, ctypes.c_ulonglong(0))
        self.call(name, ctypes.byref(descriptor), *arguments)
        return descriptor.value

    def multicast_granularity(self) -> int:
        if not self.attribute(_MULTICAST_SUPPORTED):
            raise NotHere("the device has no multicast")
        size, of = ctypes.c_size_t(), _Multicast(1, 2 * MIB, _POSIX_FD, 0)
        self.call("cuMulticastGetGranularity", ctypes.byref(size), ctypes.byref(of), 0)
        return size.value


class Nccl:
    """A communicator of one rank, by NCCL's C interface."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libnccl.so.2")
        self.comm = ctypes.c_void_p()
        self.call("ncclCommInitAll", ctypes.byref(self.comm), 1, (ctypes.c_int * 1)(0))

    def call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, name, None)
        if function is None:
            raise NotHere(f"this NCCL has no {name}")
        code = function(*arguments)
        if code != 0:
            raise RuntimeError(f"{name} returned {code}")

    def register(self, ptr: int, size: int) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        pointer = ctypes.c_void_p(ptr)
        self.call("ncclCommRegister", self.comm, pointer, ctypes.c_size_t(size), ctypes.byref(handle))
        return handle

    def window(self, ptr: int, size: int) -> ctypes.c_void_p:
        window = ctypes.c_void_p()
        arguments = (ctypes.c_void_p(ptr), ctypes.c_size_t(size), ctypes.byref(window), _SYMMETRIC_WINDOW)
        self.call("ncclCommWindowRegister", self.comm, *arguments)
        return window

    def all_reduce(self, torch: Any, tensor: Any) -> None:
        pointer, stream = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        count = ctypes.c_size_t(tensor.numel())
        self.call("ncclAllReduce", pointer, pointer, count, _FLOAT32, _SUM, self.comm, stream)


class Checks:
    def __init__(self, as_json: bool, conf: str) -> None:
        self._as_json, self._conf = as_json, conf
        self.failed = 0

    def report(self, verdict: str, name: str, detail: Any) -> None:
        line: Dict[str, Any] = {"verdict": verdict, "conf": self._conf, "name": name, "detail": detail}
        text = f"{verdict:<8}{self._conf:<16}{name}{f': {detail}' if detail not in (None, '') else ''}"
        print(json.dumps(line) if self._as_json else text, flush=True)

    def run(self, name: str, act: Callable[[], Any]) -> Any:
        """Reports whether it raises; returns what it returns."""
        try:
            found = act()
        except NotHere as why:
            return self.report("note", name, str(why))
        except Exception as error:  # whatever the driver, NCCL or PyTorch raises is the answer
            self.failed += 1
            return self.report("FAILED", name, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        self.report("ok", name, found)
        return found


def expect(holds: bool, why: Any) -> None:
    if not holds:
        raise AssertionError(why)


def closed(descriptor: int) -> None:
    expect(descriptor >= 0, "no descriptor")
    os.close(descriptor)


def child(conf: str, as_json: bool) -> int:
    import torch
    import torch.distributed as dist

    import warpool.torch

    warpool.torch.enable(conf)
    torch.cuda.set_device(0)
    checks, cuda = Checks(as_json, conf), Cuda()
    pool = warpool.torch.stable_pool()
    torch.cuda.empty_cache()
    with torch.cuda.use_mem_pool(pool):
        sent = torch.arange(32 * MIB, dtype=torch.float32, device="cuda")
        small = torch.ones(1000, device="cuda")
    expected = sent.double().sum().item()

    def segments(of: Any = None) -> List[Tuple[int, int]]:
        """Of a pool, the stable one by default: address and size."""
        found = torch.cuda.memory_snapshot((of or pool).id)
        return sorted((each["address"], each["total_size"]) for each in found)

    def aligned() -> str:
        expect(len(segments()) == 2, f"a small and a large segment: {segments()}")
        expect(all(address % (2 * MIB) == size % (2 * MIB) == 0 for address, size in segments()), segments())
        return ", ".join(f"{size // MIB} MiB" for _, size in segments())

    def one_allocation() -> None:
        for address, size in segments():
            expect(cuda.range_of(address + size - 1) == (address, size), cuda.range_of(address + size - 1))

    def created() -> None:
        for address, _ in segments():
            properties, descriptor = cuda.physical(address)
            closed(descriptor)
            expect(properties.rdma == 1, "not for GPUDirect RDMA")

    def dma_buf() -> None:
        for address, size in segments():
            closed(cuda.dma_buf(address, size))

    def multicast() -> str:
        granularity = cuda.multicast_granularity()
        expect(all(address % granularity == size % granularity == 0 for address, size in segments()), granularity)
        return f"{granularity // MIB} MiB"

    checks.run("segments are multiples of 2 MiB", aligned)
    checks.run("a segment is one allocation of the driver", one_allocation)
    checks.run("it is for RDMA, and exported as a descriptor", created)
    checks.run("it is exported as a dma-buf", dma_buf)
    checks.run("the granularity of multicast divides it", multicast)

    # NCCL's own calls.
    nccl: Optional[Nccl] = None

    def communicator() -> None:
        nonlocal nccl
        nccl = Nccl()

    def registered(registers: Callable[[Nccl, int, int], ctypes.c_void_p], ends: str) -> None:
        if nccl is None:
            raise NotHere("there is no communicator")
        handles = [registers(nccl, address, size) for address, size in segments()]
        churn(torch)
        nccl.all_reduce(torch, sent)
        torch.cuda.synchronize()
        for handle in handles:
            if handle.value is not None:
                nccl.call(ends, nccl.comm, handle)
        expect(sent.double().sum().item() == expected, "other contents after a reduction over one rank")

    before = segments()
    checks.run("a communicator of one rank", communicator)
    checks.run("ncclCommRegister while memory comes and goes", lambda: registered(Nccl.register, "ncclCommDeregister"))
    checks.run("ncclCommWindowRegister", lambda: registered(Nccl.window, "ncclCommWindowDeregister"))
    checks.run("the segments are where they were", lambda: expect(segments() == before, (before, segments())))

    # PyTorch's calls over NCCL.
    def group() -> None:
        device = torch.device("cuda", 0)
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
        dist.barrier()

    checks.run("a process group of one rank", group)
    backend = dist.group.WORLD._get_backend(torch.device("cuda")) if dist.is_initialized() else None

    def register_pool(of: Any) -> None:
        if backend is None:
            raise NotHere("there is no process group")
        with torch.cuda.use_mem_pool(of):
            tensor = torch.full((8 * MIB,), 3.0, device="cuda")
        backend.register_mem_pool(of)
        churn(torch)
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
        backend.deregister_mem_pool(of)
        expect(bool((tensor == 3).all()), "other contents after a reduction over one rank")

    def over_nccl() -> None:
        if backend is None:
            raise NotHere("there is no process group")
        try:
            allocator = backend.mem_allocator
        except RuntimeError as error:
            # PyTorch asks for multicast.
            raise NotHere(str(error).splitlines()[0]) from None
        own = torch.cuda.MemPool(allocator)
        register_pool(own)
        address, size = segments(own)[0]
        expect(address % 4096 == 0 and size >= 32 * MIB, segments(own))

    checks.run("register_mem_pool of a stable pool", lambda: register_pool(pool))
    checks.run("register_mem_pool of an ordinary pool", lambda: register_pool(torch.cuda.MemPool()))
    checks.run("register_mem_pool of a pool over ncclMemAlloc", over_nccl)
    checks.run("symmetric memory in a world of one", lambda: symmetric(torch, dist))
    checks.run("symmetric memory in its pool", lambda: symmetric_pool(torch, dist))

    # The end: the pool gives its memory back, and nothing else.
    def gone() -> str:
        nonlocal sent, small, pool
        kept, free = segments(), torch.cuda.mem_get_info()[0]
        bytes_of_pool = sum(size for _, size in kept)
        sent, small = None, None
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        expect(segments() == kept, "free segments left while the pool exists")
        pool = None
        torch.cuda.empty_cache()
        back = torch.cuda.mem_get_info()[0] - free
        expect(back >= bytes_of_pool, f"{back} bytes of {bytes_of_pool}")
        return f"{back // MIB} MiB"

    checks.run("segments stay until the pool goes", gone)
    if dist.is_initialized():
        dist.destroy_process_group()
    return checks.failed


def churn(torch: Any) -> None:
    """Other memory comes and goes, in two streams and of many sizes, and returns to the driver."""
    side = torch.cuda.Stream()
    for round in range(4):
        tensors = [torch.empty((5 + 7 * round + n) * MIB, dtype=torch.uint8, device="cuda") for n in range(20)]
        with torch.cuda.stream(side):
            tensors += [torch.empty((3 + 11 * round + n) * MIB, dtype=torch.uint8, device="cuda") for n in range(20)]
        for tensor in tensors[::2]:
            tensor.fill_(round)
        side.synchronize()
        torch.cuda.synchronize()
        del tensors, tensor
        torch.cuda.empty_cache()


def symmetric(torch: Any, dist: Any) -> None:
    try:
        from torch.distributed import _symmetric_memory as symm
    except ImportError as error:
        raise NotHere(str(error)) from error
    if not dist.is_initialized():
        raise NotHere("there is no process group")
    tensor = symm.empty(MIB, dtype=torch.float32, device="cuda").fill_(5)
    try:
        handle = symm.rendezvous(tensor, dist.group.WORLD.group_name)
    except RuntimeError as error:
        raise NotHere(f"PyTorch refuses a world of one: {str(error).splitlines()[0]}") from error
    own = handle.get_buffer(0, tensor.shape, tensor.dtype)
    expect(handle.world_size == 1 and bool((own == 5).all()), "the rank's own buffer has other contents")


def symmetric_pool(torch: Any, dist: Any) -> None:
    try:
        from torch.distributed import _symmetric_memory as symm

        pool = symm.get_mem_pool(torch.device("cuda", 0))
    except (ImportError, AttributeError, RuntimeError) as error:
        raise NotHere(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
    with torch.cuda.use_mem_pool(pool):
        tensor = torch.full((MIB,), 6.0, device="cuda")
    churn(torch)
    expect(bool((tensor == 6).all()), "other contents")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--conf", action="append", help="settings, as for warpool.torch.enable; may be repeated")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        return 1 if child(options.child, options.json) else 0
    failed = False
    for conf in options.conf or CONFS:
        command = [sys.executable, __file__, "--child", conf] + (["--json"] if options.json else [])
        try:
            status = subprocess.run(command, timeout=TIMEOUT_S).returncode
        except subprocess.TimeoutExpired:
            status = -1
            Checks(options.json, conf).report("FAILED", "the process", f"not done in {TIMEOUT_S} s")
        if status not in (0, 1, -1):
            Checks(options.json, conf).report("FAILED", "the process", f"ended with status {status}")
        failed |= status != 0
    if not options.json:
        print("Not shown, it needs a second GPU:")
        for what in NEEDS_TWO_GPUS:
            print(f"  {what}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
