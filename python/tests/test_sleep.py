"""Tests of memory that sleeps, on the simulated GPU: through ctypes, and under a fake PyTorch. Contents and graphs are
tested in Rust, and under PyTorch on a GPU (`gpu/sleep.py`)."""

import os
import sys
import threading
import unittest
from pathlib import Path
from typing import Any

from isolated import isolated

import warpool
import warpool.torch
from warpool import _native, _sleep

MIB = 1 << 20


def fake_torch() -> Any:
    sys.path.insert(0, str(Path(__file__).parent / "fake_torch"))
    import torch

    return torch


class Sleep(unittest.TestCase):
    @isolated
    def test_memory_of_a_tag_sleeps_and_wakes_at_its_address(self) -> None:
        for conf in ("", "backend:paged", "expandable_segments:True"):
            with self.subTest(conf=conf):
                self._one_round(conf)

    def _one_round(self, conf: str) -> None:
        if conf and not _native.driver():
            os.environ["WARPOOL_CONF"] = conf
        with _sleep.tag("weights", 0):
            weights = _native.malloc(30 * MIB)
        with _sleep.tag("kv", 0):
            cache = _native.malloc(50 * MIB)
        other = _native.malloc(10 * MIB)
        reserved = _native.stats(0)["reserved_bytes.all.current"]
        self.assertEqual((_sleep.prepare_sleep("kv"), _sleep.prepare_sleep()), (50 * MIB, 80 * MIB))
        report = _sleep.sleep()
        self.assertEqual((report.changed, report.unchanged), (2, 0))
        self.assertEqual((report.bytes_device, report.bytes_copied), (80 * MIB, 80 * MIB))
        stats = _native.stats(0)
        self.assertEqual(stats["asleep_bytes.all.current"], 80 * MIB)
        self.assertEqual(stats["reserved_bytes.all.current"], reserved - 80 * MIB)
        found = {info.tag: info for info in _sleep.tags()}
        self.assertEqual([(info.asleep, info.keep) for info in found.values()], [(True, "host")] * 2)
        self.assertEqual((found["kv"].bytes, found["kv"].bytes_device, found["kv"].bytes_host), (50 * MIB, 0, 50 * MIB))
        with self.assertRaisesRegex(warpool.Error, "wake the tag"), _sleep.tag("kv", 0):
            _native.malloc(MIB)
        # Weights wake before the cache; sleeping memory can be freed.
        self.assertEqual(_sleep.wake("weights").bytes_copied, 30 * MIB)
        self.assertEqual([info.asleep for info in _sleep.tags()], [True, False])
        self.assertEqual(_sleep.sleep(["kv"], keep="discard").unchanged, 1)
        self.assertEqual({info.tag: info.bytes_host for info in _sleep.tags()}, {"kv": 0, "weights": 0})
        _native.free(cache, 50 * MIB)
        _sleep.wake()
        for ptr, size in ((weights, 30 * MIB), (other, 10 * MIB)):
            _native.free(ptr, size)

    @isolated
    def test_scopes_are_of_their_thread_and_nest(self) -> None:
        def pools() -> dict:
            return {info.tag: info.bytes for info in _sleep.tags()}

        with _sleep.tag("outer", 0), _sleep.tag("inner", 0):
            _native.malloc(30 * MIB)
            thread = threading.Thread(target=_native.malloc, args=(40 * MIB,))
            thread.start()
            thread.join()
        self.assertEqual(pools(), {"inner": 30 * MIB, "outer": 0})
        with _sleep.tag("outer", 0):
            _native.malloc(50 * MIB)
        _native.malloc(60 * MIB)
        self.assertEqual(pools(), {"inner": 30 * MIB, "outer": 50 * MIB})

    @isolated
    def test_wrong_arguments_are_errors(self) -> None:
        self.assertEqual(_sleep.sleep().changed, 0)
        self.assertEqual(_sleep.tags(), [])
        with self.assertRaisesRegex(warpool.Error, "nobody"):
            _sleep.sleep("nobody")
        with self.assertRaisesRegex(ValueError, "choose 'host' or 'discard'"):
            _sleep.sleep(keep="disk")
        with self.assertRaisesRegex(warpool.Error, "1 to 63 bytes"), _sleep.tag("", 0):
            pass
        with self.assertRaisesRegex(warpool.Error, "1 to 63 bytes"), _sleep.tag("x" * 64, 0):
            pass
        with self.assertRaisesRegex(ValueError, "null character"), _sleep.tag("a\0b", 0):
            pass
        with self.assertRaisesRegex(warpool.Error, "device index 99"), _sleep.tag("a", 99):
            pass

    @isolated
    def test_a_full_device_is_an_error_that_says_what_was_missing(self) -> None:
        os.environ["WARPOOL_SIM"] = "memory_mb:2048"
        with _sleep.tag("weights", 0):
            _native.malloc(1000 * MIB)
        _sleep.sleep("weights", keep="discard")
        other = _native.malloc(1400 * MIB)
        with self.assertRaisesRegex(warpool.Error, "1000.00 MiB of device memory are needed.*sleep, as before"):
            _sleep.wake()
        _native.free(other, 1400 * MIB)
        _sleep.wake()

    @isolated
    def test_the_driver_s_own_pools_cannot_sleep(self) -> None:
        os.environ["WARPOOL_CONF"] = "backend:cudaMallocAsync"
        with self.assertRaisesRegex(warpool.Error, "choose backend:native or backend:paged"), _sleep.tag("a", 0):
            pass

    @isolated
    def test_under_pytorch_s_pluggable_interface(self) -> None:
        torch = fake_torch()
        os.environ["WARPOOL_TORCH"] = "pluggable"
        warpool.torch.enable()
        with warpool.torch.tag("weights", 0):
            ptr = torch.allocate(30 * MIB)
        allocated = torch.cuda.memory_allocated()
        warpool.torch.sleep()
        self.assertEqual(torch.cuda.memory_reserved(), 0)
        self.assertEqual(torch.cuda.memory_allocated(), allocated)
        self.assertEqual(torch.cuda.memory_stats()["asleep_bytes.all.current"], 30 * MIB)
        warpool.torch.wake(["weights"])
        self.assertEqual(torch.cuda.memory_reserved(), 30 * MIB)
        torch.release(ptr, 30 * MIB)


if __name__ == "__main__":
    unittest.main()
