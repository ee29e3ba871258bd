"""Tests of `warpool.torch.memory_saver` and of Warpool as vLLM's sleep backend, on the simulated GPU: with doubles of
their callers (`serving`), and a fake of PyTorch. `serving_packages.py` has the real packages' classes."""

import contextlib
import os
import sys
import unittest
from typing import Any, Dict
from unittest import mock

from fake_torch import fake_torch
from isolated import isolated
from memory import free, malloc, stats
from serving import Engine, Worker, vllm
from test_enable import WithBackend

import warpool
import warpool.torch
from warpool import _sleep, _vllm
from warpool.torch import memory_saver

MIB = 1 << 20


def asleep() -> Dict[str, Any]:
    """The tags that sleep, with what was kept of them."""
    return {info.tag: info.keep for info in _sleep.tags() if info.asleep}


def reserved() -> int:
    return stats()["reserved_bytes.all.current"] // MIB


class Serving(WithBackend):
    """With Warpool as the allocator of a fake PyTorch."""

    def enable(self) -> Any:
        torch = fake_torch()
        torch.cuda.empty_cache = mock.Mock()
        warpool.torch.enable()
        return torch


class Saver(Serving):
    @isolated
    def test_engine_releases_and_resumes(self) -> None:
        torch = self.enable()
        torch.cuda.graph = mock.Mock(side_effect=lambda *_, **__: contextlib.nullcontext())
        memory_saver.install()
        memory_saver.install()
        engine = Engine(malloc)
        engine.load(30 * MIB, 50 * MIB)
        engine.capture("graph", 20 * MIB)
        torch.cuda.graph.assert_called_once_with("graph", pool=(0, 1), stream=None, capture_error_mode="thread_local")
        engine.start_process(lambda: None)
        self.assertEqual(reserved(), 100)
        engine.release_memory_occupation()
        self.assertEqual(asleep(), {"kv_cache": "discard", "weights+backup": "host", "cuda_graph": "discard"})
        self.assertEqual(reserved(), 0)
        # Twice is not an error, nor is a tag without regions: torch_memory_saver ends the process for the first.
        engine.release_memory_occupation(["weights", "nothing"])
        other = malloc(40 * MIB)
        engine.resume_memory_occupation(["weights", "nothing"])
        self.assertEqual(set(asleep()), {"kv_cache", "cuda_graph"})
        free(other)
        engine.resume_memory_occupation()
        engine.resume_memory_occupation()
        self.assertEqual(asleep(), {})
        for pointer in engine.pointers.values():
            free(pointer)

    @isolated
    def test_pause_of_everything_keeps_what_regions_said(self) -> None:
        self.enable()
        for tag, kept, size in (("a", True, 30), ("a", False, 40), ("b", True, 50)):
            with memory_saver.region(tag, enable_cpu_backup=kept, cpu_backup_backend="pinned" if kept else None):
                malloc(size * MIB)
        with _sleep.tag("of the program", 0):
            malloc(60 * MIB)
        done = memory_saver.pause("a")
        self.assertEqual((done.changed, done.bytes_copied, done.bytes_device), (2, 30 * MIB, 70 * MIB))
        self.assertEqual(asleep(), {"a": "discard", "a+backup": "host"})
        done = memory_saver.pause()
        self.assertEqual((done.changed, done.unchanged, done.bytes_copied), (1, 2, 50 * MIB))
        # The program's own tags are not paused.
        self.assertEqual(reserved(), 60)
        self.assertEqual(memory_saver.resume("").changed, 3)
        self.assertEqual(asleep(), {})

    @isolated
    def test_regions_nest_and_can_be_left_out(self) -> None:
        self.enable()
        memory_saver.install()
        engine = Engine(malloc)
        engine.load_a_helper(20 * MIB)
        with memory_saver.region("outer"):
            with memory_saver.region("inner"), memory_saver.disable(), memory_saver.region("within"):
                malloc(30 * MIB)
            malloc(40 * MIB)
        found = {info.tag: info.bytes // MIB for info in _sleep.tags()}
        self.assertEqual(found, {"weights+backup": 20, "outer": 40, "inner": 0, "within": 30})
        with self.assertRaisesRegex(RuntimeError, "within a region"), memory_saver.disable():
            pass

    @isolated
    def test_failed_pause_changes_nothing(self) -> None:
        self.enable()
        for tag, kept in (("weights", True), ("state", True), ("cache", False)):
            with memory_saver.region(tag, enable_cpu_backup=kept):
                malloc(30 * MIB)
        memory_saver.pause("state")
        warpool.torch.set_settings("pinned_cap_mb:40")
        before = asleep()
        with self.assertRaisesRegex(warpool.Error, "pinned"):
            memory_saver.pause()
        self.assertEqual(asleep(), before)
        warpool.torch.set_settings("pinned_cap_mb:100")
        # Those without contents cannot sleep after the others did.
        sleep = _sleep.sleep

        def fails(tags: Any, keep: str) -> Any:
            if keep == "discard":
                raise warpool.Error("the driver failed")
            return sleep(tags, keep)

        with mock.patch.object(_sleep, "sleep", fails), self.assertRaisesRegex(warpool.Error, "the driver failed"):
            memory_saver.pause()
        self.assertEqual(asleep(), before)
        memory_saver.pause()
        self.assertEqual(len(asleep()), 3)

    @isolated
    def test_resume_on_a_full_device_is_an_error_and_can_be_repeated(self) -> None:
        os.environ["WARPOOL_SIM"] = "memory_mb:2048"
        self.enable()
        with memory_saver.region(enable_cpu_backup=True):
            malloc(1000 * MIB)
        memory_saver.pause()
        other = malloc(1400 * MIB)
        with self.assertRaisesRegex(warpool.Error, "sleep, as before"):
            memory_saver.resume()
        free(other)
        self.assertEqual(memory_saver.resume().bytes_copied, 1000 * MIB)

    @isolated
    def test_what_is_not_supported_says_so(self) -> None:
        for call in (lambda: memory_saver.region().__enter__(), memory_saver.install):
            with self.assertRaisesRegex(RuntimeError, "call warpool.torch.enable\\(\\) right after"):
                call()
        self.assertFalse(memory_saver.enabled)
        self.enable()
        for options, error, text in (
            ({"enable_disk_backup": True}, NotImplementedError, "on disk"),
            ({"enable_cpu_backup": True, "cpu_backup_backend": "mmap"}, NotImplementedError, "say 'pinned'"),
            ({"cpu_backup_backend": "pinned"}, ValueError, "enable_cpu_backup=True"),
            ({"tag": ""}, warpool.Error, "1 to 63 bytes"),
        ):
            with self.subTest(text), self.assertRaisesRegex(error, text), memory_saver.region(**options):
                pass
        with memory_saver.region("a", enable_cpu_backup=True):
            pass
        with self.assertRaisesRegex(ValueError, "'a[+]backup' and 'a' would share"), memory_saver.region("a+backup"):
            pass
        memory_saver.memory_margin_bytes = 0
        for call in (
            lambda: setattr(memory_saver, "memory_margin_bytes", MIB),
            lambda: setattr(memory_saver, "retain_cpu_backup", False),
            lambda: memory_saver.get_cpu_backup(None),
            lambda: memory_saver.set_disk_backup_dir("/tmp"),
        ):
            with self.assertRaises(NotImplementedError):
                call()
        sys.modules["torch_memory_saver"] = mock.Mock()
        with self.assertRaisesRegex(RuntimeError, "too late: torch_memory_saver is imported"):
            memory_saver.install()


class Vllm(Serving):
    @isolated
    def test_worker_sleeps_and_wakes_by_tag(self) -> None:
        torch = self.enable()
        torch.cuda.graph_pool_handle = mock.Mock(return_value=(0, 7))
        vllm()
        _vllm.register()
        _vllm.register()
        worker = Worker("warpool", malloc)
        worker.load(weights=30 * MIB, kv_cache=50 * MIB, workspace=20 * MIB, runtime=40 * MIB)
        self.assertEqual((worker.capture(60 * MIB), worker.capture(60 * MIB)), ((0, 7), (0, 7)))
        self.assertEqual((worker.allocator.get_current_usage(), reserved()), (260 * MIB, 260))
        self.assertEqual(worker.backend.state(), "RUNNING")
        kept = {"weights": "host", "runtime": "host", "cudagraph": "host"}
        worker.sleep(1)
        self.assertEqual(asleep(), {**kept, "kv_cache": "discard", "workspace": "discard"})
        self.assertEqual((worker.allocator.get_current_usage(), reserved()), (260 * MIB, 0))
        self.assertTrue(torch.cuda.empty_cache.called)
        # A second sleep at another level does not drop what the first one kept.
        worker.sleep(2)
        self.assertEqual(asleep()["weights"], "host")
        # What is neither weights nor cache wakes with any of them.
        worker.wake_up(["weights"])
        self.assertEqual((asleep(), worker.backend.state()), ({"kv_cache": "discard"}, "SUSPENDED"))
        worker.wake_up(["kv_cache"])
        self.assertEqual((asleep(), worker.backend.state()), ({}, "RUNNING"))
        worker.backend.discard(("kv_cache",))
        self.assertEqual(asleep(), {"kv_cache": "discard"})
        worker.wake_up()
        worker.sleep(2)
        self.assertEqual(asleep()["weights"], "discard")
        worker.wake_up()
        worker.shutdown()
        self.assertEqual(reserved(), 260)

    @isolated
    def test_vllm_s_own_backend_uses_tags_too(self) -> None:
        self.enable()
        backends = vllm()
        _vllm.register()
        backends.SleepModeBackendFactory.made["cumem"] = lambda: backends.CuMemBackend
        worker = Worker("cumem", malloc)
        worker.load(weights=30 * MIB, kv_cache=50 * MIB)
        worker.sleep()
        self.assertEqual(asleep(), {"weights": "host", "kv_cache": "discard"})

    @isolated
    def test_without_warpool_nothing_of_vllm_changes(self) -> None:
        fake_torch()
        _vllm.register()
        self.assertNotIn("vllm", sys.modules)
        backends = vllm()
        _vllm.register()
        cumem = sys.modules["vllm.device_allocator.cumem"]
        self.assertIsNone(cumem.CuMemAllocator.instance)
        self.assertFalse(warpool.torch.enabled())
        with self.assertRaisesRegex(RuntimeError, "sleep backend 'warpool' needs Warpool as PyTorch's allocator"):
            backends.SleepModeBackendFactory.get_backend_class("warpool")()

    @isolated
    def test_conf_in_the_environment_enables_warpool(self) -> None:
        fake_torch()
        vllm()
        os.environ["WARPOOL_CONF"] = "backend:paged"
        with self.assertLogs("warpool.vllm", "ERROR") as logs:
            _vllm.register()
        self.assertIn("VLLM_WORKER_MULTIPROCESSING_METHOD=spawn", logs.output[0])
        self.assertFalse(warpool.torch.enabled())
        os.environ["VLLM_WORKER_MULTIPROCESSING_METHOD"] = "spawn"
        _vllm.register()
        self.assertTrue(warpool.torch.enabled() and _vllm.is_in_use())

    @isolated
    def test_allocator_that_is_in_use_is_not_replaced(self) -> None:
        self.enable()
        backends = vllm()
        own = sys.modules["vllm.device_allocator.cumem"].CuMemAllocator.get_instance()
        with self.assertLogs("warpool.vllm", "ERROR") as logs:
            _vllm.register()
        self.assertIn("has made its own already", logs.output[0])
        self.assertIs(sys.modules["vllm.device_allocator.cumem"].CuMemAllocator.instance, own)
        with self.assertRaisesRegex(RuntimeError, "vLLM has allocated by its own allocator"):
            backends.SleepModeBackendFactory.get_backend_class("warpool")()


if __name__ == "__main__":
    unittest.main()
