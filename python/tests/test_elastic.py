"""Tests of elastic memory, on the simulated GPU through ctypes. Contents, order and graphs are tested in Rust."""

import ctypes
import os
import unittest
from typing import Any

from fake_torch import fake_torch
from isolated import isolated
from memory import free, malloc, stats

import warpool
from warpool import _elastic, _native, _sleep
from warpool._elastic import Elastic

MIB = 1 << 20
# (layers, keys and values, blocks, tokens, heads, size): sixteen blocks to the largest page of each row.
SHAPE = (3, 2, 64, 16, 32, 512)


def cache(shape: Any = SHAPE, item: int = 2, dim: Any = 2, tag: Any = None) -> Elastic:
    os.environ.setdefault("WARPOOL_CONF", "backend:paged")
    _native.start("paged")
    return Elastic(_elastic.reserve(shape, item, dim, 0, 0, tag), 0)


class ElasticMemory(unittest.TestCase):
    @isolated
    def test_blocks_come_and_go(self) -> None:
        fake_torch()
        kv = cache(tag="kv")
        info = kv.info()
        self.assertEqual((info.blocks, info.committed, info.bytes), (64, 0, 192 * MIB))
        self.assertEqual((info.page_bytes, info.blocks_per_page), (8 * MIB, 16))
        self.assertEqual(stats()["reserved_bytes.all.current"], 0)
        kv.commit(0, 32, 0)
        self.assertEqual((kv.info().committed, kv.info().bytes_committed), (32, 96 * MIB))
        self.assertEqual(stats()["allocated_bytes.all.current"], 96 * MIB)
        self.assertTrue(kv.is_committed(0, 32))
        self.assertFalse(kv.is_committed(31, 33))
        kv.decommit(16, 32, 0)
        # The pages serve others: reserved memory does not grow.
        reserved = stats()["reserved_bytes.all.current"]
        block = malloc(48 * MIB)
        self.assertEqual(stats()["reserved_bytes.all.current"], reserved)
        self.assertEqual(_native.page_stats(0)["elastic_bytes"], 48 * MIB)
        free(block)
        kv.record_stream(0)
        self.assertIn("64 blocks", repr(kv))
        _native.library().warpool_elastic_release(ctypes.c_void_p(kv.ptr))
        with self.assertRaisesRegex(warpool.Error, "no elastic memory begins at"):
            kv.info()
        self.assertEqual(stats()["allocated_bytes.all.current"], 0)

    @isolated
    def test_it_sleeps_and_wakes_with_its_tag(self) -> None:
        fake_torch()
        kv = cache(tag="kv")
        kv.commit(0, 16, 0)
        report = _sleep.sleep("kv")
        self.assertEqual((report.changed, report.bytes_device, report.bytes_copied), (1, 48 * MIB, 48 * MIB))
        self.assertEqual((kv.info().committed, stats()["reserved_bytes.all.current"]), (0, 0))
        with self.assertRaisesRegex(warpool.Error, "wake the tag"):
            kv.commit(0, 1, 0)
        self.assertEqual([info.bytes for info in _sleep.tags()], [48 * MIB])
        _sleep.wake()
        self.assertTrue(kv.is_committed(0, 16))

    @isolated
    def test_a_commit_that_does_not_fit_changes_nothing(self) -> None:
        torch = fake_torch()
        torch.OutOfMemoryError = type("OutOfMemoryError", (RuntimeError,), {})
        os.environ["WARPOOL_SIM"] = "memory_mb:1024"
        kv = cache((1024, MIB), 2, dim=0)
        kv.commit(0, 10, 0)
        room = _elastic.headroom(0)
        with self.assertRaisesRegex(torch.OutOfMemoryError, "out of memory"):
            kv.commit(0, 11 + room // (2 * MIB), 0)
        self.assertEqual(kv.info().committed, 10)
        kv.commit(0, 10 + room // (2 * MIB), 0)
        self.assertEqual(_elastic.headroom(0), 0)

    @isolated
    def test_the_dimension_of_blocks(self) -> None:
        fake_torch()
        for dim, blocks, per_page in ((None, 512, 0), (2, 64, 16), (-4, 64, 16), (0, 3, 1), (1, 2, 1)):
            with self.subTest(dim=dim):
                info = cache(dim=dim).info()
                self.assertEqual((info.blocks, info.blocks_per_page), (blocks, per_page))
        for dim in (6, -7):
            with self.assertRaisesRegex(IndexError, "no dimension"):
                cache(dim=dim)
        self.assertEqual(cache((8, 10000, 8), dim=None).info().blocks, 10000)
        for shape in ((), (3, 0)):
            with self.assertRaisesRegex(ValueError, "needs a dimension"):
                cache(shape)

    @isolated
    def test_wrong_arguments_are_errors(self) -> None:
        fake_torch()
        kv = cache((10, 100), dim=None)
        for first, last in ((0, 101), (5, 4)):
            with self.assertRaisesRegex(warpool.Error, "not blocks of elastic memory that has 100"):
                kv.commit(first, last, 0)
        with self.assertRaisesRegex(IndexError, "negative"):
            kv.commit(-1, 3, 0)

    @isolated
    def test_other_backends_have_none(self) -> None:
        fake_torch()
        os.environ["WARPOOL_CONF"] = "backend:native"
        with self.assertRaisesRegex(warpool.Error, "use backend:paged"):
            cache()

    @isolated
    def test_a_tensor_owns_its_memory(self) -> None:
        """As PyTorch takes a tensor of the exchange format: its deleter releases the memory."""
        fake_torch()

        class Tensor(ctypes.Structure):
            _fields_ = [
                ("data", ctypes.c_void_p),
                ("device_type", ctypes.c_int32),
                ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32),
                ("code", ctypes.c_uint8),
                ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.c_void_p),
                ("byte_offset", ctypes.c_uint64),
                ("manager", ctypes.c_void_p),
                ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
            ]

        kv = cache()
        kv.commit(0, 64, 0)
        with self.assertRaisesRegex(warpool.Error, "is not the elastic memory of"):
            _elastic._capsule(kv.ptr, 16, (1, *SHAPE[1:]))
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        made = pointer(_elastic._capsule(kv.ptr, 16, SHAPE), b"dltensor")
        tensor = Tensor.from_address(made)
        self.assertEqual((tensor.data, tensor.device_type, tensor.device_id), (kv.ptr, 2, 0))
        self.assertEqual((tensor.code, tensor.bits, tensor.lanes, tensor.byte_offset), (0, 16, 1, 0))
        self.assertEqual(tuple(tensor.shape[: tensor.ndim]), SHAPE)
        self.assertEqual((tensor.strides, stats()["allocated_bytes.all.current"]), (None, 192 * MIB))
        tensor.deleter(made)
        self.assertEqual(stats()["allocated_bytes.all.current"], 0)
        with self.assertRaisesRegex(warpool.Error, "no elastic memory begins at"):
            kv.info()


if __name__ == "__main__":
    unittest.main()
