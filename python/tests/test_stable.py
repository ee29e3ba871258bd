"""Tests of stable pools, on the simulated GPU through ctypes. Registrations are tested in Rust, and NCCL's under
PyTorch on a GPU (`gpu/registered.py`)."""

import ctypes
import os
import types
import unittest
from typing import Any, List, Tuple

from fake_torch import fake_torch
from isolated import isolated
from memory import free, malloc, stats

import warpool
from warpool import _native, _sleep, _stable

MIB = 1 << 20
_FILTER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_accept = _FILTER(lambda _user, _stream: 1)


class _RangeChange(ctypes.Structure):
    _fields_ = [
        ("event", ctypes.c_int),
        ("device", ctypes.c_int),
        ("ptr", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("generation", ctypes.c_uint64),
    ]


_OBSERVER = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(_RangeChange))


def call(name: str, *arguments: Any) -> None:
    function = getattr(_native.library(), name)
    function.restype = ctypes.c_int
    _native.raise_if(function(*arguments), name)


def created(user: int) -> Tuple[int, int]:
    """A pool, as PyTorch's constructor creates it."""
    call("warpool_pool_create", 0, _stable._PoolId(0, user))
    return (0, user)


def allocate(pool: Tuple[int, int], size: int) -> int:
    """As a tensor in `torch.cuda.use_mem_pool`."""
    call("warpool_pool_begin", 0, _stable._PoolId(*pool), _accept, None, None)
    function = _native.library().warpool_allocate
    function.restype, function.argtypes = ctypes.c_void_p, (ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    ptr = function(size, 0, None)
    call("warpool_pool_end", 0, _stable._PoolId(*pool))
    call("warpool_pool_release", 0, _stable._PoolId(*pool))
    if not ptr:
        raise _native.Error(_native.last_error())
    return ptr


class StablePools(unittest.TestCase):
    def start(self, conf: str) -> None:
        os.environ["WARPOOL_CONF"] = conf
        _native.start("paged")

    @isolated
    def test_segments_are_aligned_and_do_not_sleep(self) -> None:
        self.start("backend:native")
        self._one_pool()

    @isolated
    def test_the_same_with_pages(self) -> None:
        self.start("backend:paged")
        self._one_pool()

    def _one_pool(self) -> None:
        stable, ordinary = created(1), created(2)
        _stable.make_stable(0, stable)
        with _sleep.tag("weights", 0):
            first, second = allocate(stable, 30 * MIB), allocate(ordinary, 50 * MIB)
        self.assertEqual(first % (2 * MIB), 0)
        self.assertNotEqual(first, second)
        self.assertEqual(stats()["reserved_bytes.all.current"], 80 * MIB)
        # The ordinary pool was first used in the tag's scope, and carries it.
        self.assertEqual(_sleep.sleep(keep="discard").bytes_device, 50 * MIB)
        self.assertEqual(stats()["reserved_bytes.all.current"], 30 * MIB)
        _sleep.wake()

    @isolated
    def test_observers_are_told_of_ranges(self) -> None:
        self.start("backend:native")
        told: List[Tuple[int, int, int]] = []

        def observe(_user: Any, change: Any) -> None:
            found = change.contents
            told.append((found.event, found.ptr, found.bytes // MIB))
            self.assertEqual((found.device, found.generation), (0, len(told)))

        observer = _OBSERVER(observe)
        call("warpool_attach_range_observer", observer, None, None)
        pool = created(1)
        _stable.make_stable(0, pool)
        block, other = allocate(pool, 30 * MIB), malloc(50 * MIB)
        free(other)
        call("warpool_empty_cache")
        mapped, unmapping = 0, 1
        self.assertEqual(told, [(mapped, block, 30), (mapped, other, 50), (unmapping, other, 50)])

    @isolated
    def test_it_is_chosen_before_the_first_use(self) -> None:
        self.start("backend:native")
        pool = created(1)
        allocate(pool, MIB)
        with self.assertRaisesRegex(warpool.Error, "in use already; stable is chosen when a pool is created"):
            _stable.make_stable(0, pool)
        with self.assertRaisesRegex(warpool.Error, "pool"):
            _stable.make_stable(0, (0, 77))

    @isolated
    def test_a_backend_without_such_pools_says_so(self) -> None:
        self.start("backend:cudaMallocAsync")
        with self.assertRaisesRegex(warpool.Error, "native"):
            _stable.make_stable(0, created(1))

    @isolated
    def test_it_needs_warpool_as_the_allocator(self) -> None:
        torch = fake_torch()
        torch.cuda.MemPool = types.SimpleNamespace
        with self.assertRaisesRegex(RuntimeError, "stable_pool needs Warpool as PyTorch's allocator"):
            _stable.stable_pool()


if __name__ == "__main__":
    unittest.main()
