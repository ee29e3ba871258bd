"""Tests of memory that sleeps, on the simulated GPU through ctypes. Contents and graphs are tested in Rust, and under
PyTorch on a GPU (`gpu/sleep.py`)."""

import os
import threading
import unittest

from isolated import isolated
from memory import free, malloc, stats

import warpool
from warpool import _native, _sleep

MIB = 1 << 20


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
            weights = malloc(30 * MIB)
        with _sleep.tag("kv", 0):
            cache = malloc(50 * MIB)
        other = malloc(10 * MIB)
        reserved = stats()["reserved_bytes.all.current"]
        self.assertEqual((_sleep.prepare_sleep("kv"), _sleep.prepare_sleep()), (50 * MIB, 80 * MIB))
        report = _sleep.sleep()
        self.assertEqual((report.changed, report.unchanged), (2, 0))
        self.assertEqual((report.bytes_device, report.bytes_copied), (80 * MIB, 80 * MIB))
        self.assertEqual(stats()["asleep_bytes.all.current"], 80 * MIB)
        self.assertEqual(stats()["reserved_bytes.all.current"], reserved - 80 * MIB)
        found = {info.tag: info for info in _sleep.tags()}
        self.assertEqual([(info.asleep, info.keep) for info in found.values()], [(True, "host")] * 2)
        self.assertEqual((found["kv"].bytes, found["kv"].bytes_device, found["kv"].bytes_host), (50 * MIB, 0, 50 * MIB))
        with self.assertRaisesRegex(warpool.Error, "wake the tag"), _sleep.tag("kv", 0):
            malloc(MIB)
        # Weights wake before the cache; sleeping memory can be freed.
        self.assertEqual(_sleep.wake("weights").bytes_copied, 30 * MIB)
        self.assertEqual([info.asleep for info in _sleep.tags()], [True, False])
        self.assertEqual(_sleep.sleep(["kv"], keep="discard").unchanged, 1)
        self.assertEqual({info.tag: info.bytes_host for info in _sleep.tags()}, {"kv": 0, "weights": 0})
        free(cache)
        _sleep.wake()
        for ptr in (weights, other):
            free(ptr)

    @isolated
    def test_scopes_are_of_their_thread_and_nest(self) -> None:
        def pools() -> dict:
            return {info.tag: info.bytes for info in _sleep.tags()}

        with _sleep.tag("outer", 0), _sleep.tag("inner", 0):
            malloc(30 * MIB)
            thread = threading.Thread(target=malloc, args=(40 * MIB,))
            thread.start()
            thread.join()
        self.assertEqual(pools(), {"inner": 30 * MIB, "outer": 0})
        with _sleep.tag("outer", 0):
            malloc(50 * MIB)
        malloc(60 * MIB)
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
            malloc(1000 * MIB)
        _sleep.sleep("weights", keep="discard")
        other = malloc(1400 * MIB)
        with self.assertRaisesRegex(warpool.Error, "1000.00 MiB of device memory are needed.*sleep, as before"):
            _sleep.wake()
        free(other)
        _sleep.wake()

    @isolated
    def test_the_driver_s_own_pools_cannot_sleep(self) -> None:
        os.environ["WARPOOL_CONF"] = "backend:cudaMallocAsync"
        with self.assertRaisesRegex(warpool.Error, "choose backend:native or backend:paged"), _sleep.tag("a", 0):
            pass


if __name__ == "__main__":
    unittest.main()
