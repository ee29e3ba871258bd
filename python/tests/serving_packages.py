"""Compares Warpool with the real classes of torch_memory_saver and vLLM, which are installed without what they need:
`environments` does it. Needs PyTorch. No GPU: memory is that of the simulated one."""

import importlib
import inspect
import sys
import types
import unittest
from typing import Any, List
from unittest import mock

import torch
from isolated import isolated
from memory import malloc, stats

import warpool.torch
from warpool import _memory_saver, _sleep, _vllm

MIB = 1 << 20

# vLLM's compiled part needs a driver.
sys.modules["vllm.cumem_allocator"] = None  # type: ignore[assignment]


def public(owner: Any) -> List[str]:
    return [name for name in vars(owner) if not name.startswith("_")]


def parameters(function: Any) -> List[Any]:
    """Names and defaults, without `self` and types."""
    found = inspect.signature(inspect.unwrap(function)).parameters.values()
    return [(each.name, each.default) for each in found if each.name != "self"]


class TorchMemorySaver(unittest.TestCase):
    def test_every_public_name_is_there_with_the_same_parameters(self) -> None:
        package = importlib.import_module("torch_memory_saver")
        names = public(package.TorchMemorySaver)
        self.assertIn("region", names)
        for name in names:
            theirs, ours = getattr(package.TorchMemorySaver, name), getattr(_memory_saver.MemorySaver, name)
            with self.subTest(name):
                self.assertEqual(isinstance(ours, property), isinstance(theirs, property))
                if isinstance(theirs, property):
                    self.assertEqual(ours.fset is None, theirs.fset is None)
                else:
                    self.assertEqual(parameters(ours), parameters(theirs))

    def test_stand_in_has_every_name_of_the_package(self) -> None:
        package = importlib.import_module("torch_memory_saver")
        stand_in = _memory_saver._stand_in(_memory_saver.memory_saver)
        for name in public(package):
            if not isinstance(getattr(package, name), types.ModuleType):
                self.assertTrue(hasattr(stand_in, name), name)
        self.assertEqual(parameters(stand_in.configure_subprocess), parameters(package.configure_subprocess))


class Vllm(unittest.TestCase):
    def test_allocator_has_the_calls_of_vllm_s(self) -> None:
        protocol = importlib.import_module("vllm.device_allocator").MemAllocator
        cumem = importlib.import_module("vllm.device_allocator.cumem")
        names = [*public(protocol), "cudagraph_pool", "release_pools", "close"]
        self.assertTrue({"use_memory_pool", "sleep", "discard", "wake_up", "get_current_usage"} <= set(names))
        for name in names:
            with self.subTest(name):
                expected = parameters(getattr(cumem.CuMemAllocator, name))
                self.assertEqual(parameters(getattr(_vllm.SleepAllocator, name)), expected)
        self.assertEqual(
            set(importlib.import_module("vllm.device_allocator").DEFERRABLE_TAGS), set(_vllm._MAY_SLEEP_ON)
        )

    @isolated
    def test_worker_s_calls_through_vllm_s_own_classes(self) -> None:
        backends = importlib.import_module("vllm.device_allocator.sleep_mode_backend")
        allocators = importlib.import_module("vllm.device_allocator")
        cumem = importlib.import_module("vllm.device_allocator.cumem")
        # As on a machine with a GPU, where enable() has been called.
        warpool.torch._enabled = True
        torch.cuda.current_device = lambda: 0
        torch.cuda.empty_cache = mock.Mock()
        cumem.cumem_available = True
        allocators.current_platform = types.SimpleNamespace(is_cuda_alike=lambda: True)
        _vllm.register()
        _vllm.register()
        backend = backends.SleepModeBackendFactory.create_backend(
            types.SimpleNamespace(sleep_mode_backend="warpool")  # As of a ModelConfig.
        )
        self.assertIsInstance(backend, backends.SleepModeBackend)
        self.assertTrue(backend.preserves_communicators())
        allocator = allocators.get_mem_allocator_instance()
        self.assertEqual(allocator.get_current_usage(), 0)
        for tag, size in (("weights", 30), ("kv_cache", 50), ("workspace", 20), ("runtime", 40)):
            with allocator.use_memory_pool(tag=tag):
                malloc(size * MIB)
        self.assertEqual(backend.state(), "RUNNING")
        backend.suspend(1)
        self.assertEqual((backend.state(), stats()["reserved_bytes.all.current"]), ("SUSPENDED", 0))
        found = {info.tag: info.keep for info in _sleep.tags()}
        self.assertEqual(found, {"weights": "host", "runtime": "host", "kv_cache": "discard", "workspace": "discard"})
        backend.resume(["weights"])
        self.assertEqual([info.tag for info in _sleep.tags() if info.asleep], ["kv_cache"])
        backend.resume()
        backend.suspend(2)
        self.assertEqual({info.keep for info in _sleep.tags() if info.tag in ("weights", "kv_cache")}, {"discard"})
        backend.resume()
        backend.discard(("kv_cache",))
        self.assertEqual([info.tag for info in _sleep.tags() if info.asleep], ["kv_cache"])
        backend.resume()
        self.assertEqual(backend.state(), "RUNNING")


if __name__ == "__main__":
    unittest.main()
