"""Tests of `warpool.torch.enable` with a minimal fake of PyTorch (tests/fake_torch), on the simulated GPU."""

import os
import sys
import unittest
import warnings
from pathlib import Path
from typing import Any, Dict, Optional
from unittest import mock

from isolated import isolated

import warpool
import warpool.torch
from warpool import _backend

MIB = 1 << 20


def fake_torch() -> Any:
    """Imports the fake. It has no backend, also if the package has one for its version."""
    _backend._READY = Path(__file__).parent / "no-backends"
    sys.path.insert(0, str(Path(__file__).parent / "fake_torch"))
    import torch

    assert torch.__version__.endswith("+fake"), torch.__file__
    return torch


class Enable(unittest.TestCase):
    @isolated
    def test_tensors_are_allocated_by_warpool(self) -> None:
        torch = fake_torch()
        self.assertFalse(warpool.torch.enabled())
        warpool.torch.enable()
        self.assertTrue(warpool.torch.enabled())
        ptr = torch.allocate(4 * MIB)
        self.assertEqual(torch.cuda.memory_allocated(), 4 * MIB)
        torch.release(ptr, 4 * MIB)
        self.assertEqual(torch.cuda.memory_allocated(), 0)

    @isolated
    def test_all_hooks_are_set(self) -> None:
        torch = fake_torch()
        warpool.torch.enable()
        self.assertEqual(set(torch._C.current.hooks), set(torch._C.current._TYPES))
        torch.release(torch.allocate(10 * MIB), 10 * MIB)
        torch._C.current.hooks["set_reset_fn"]()
        self.assertEqual(torch.cuda.memory_reserved(), 0)

    @isolated
    def test_second_enable_is_an_error(self) -> None:
        fake_torch()
        warpool.torch.enable()
        with self.assertRaisesRegex(RuntimeError, "called before.*set_settings"):
            warpool.torch.enable()
        self.assertTrue(warpool.torch.enabled())

    @isolated
    def test_enable_after_cuda_is_in_use_is_an_error(self) -> None:
        torch = fake_torch()
        torch.allocate(1)
        with self.assertRaisesRegex(RuntimeError, "too late.*right after `import torch`"):
            warpool.torch.enable()
        self.assertFalse(warpool.torch.enabled())
        self.assertEqual(torch._C._cuda_memoryStats(0), "native")

    @isolated
    def test_enable_after_another_allocator_is_an_error(self) -> None:
        torch = fake_torch()
        path = warpool.library_path()
        other = torch.cuda.memory.CUDAPluggableAllocator(path, "warpool_malloc", "warpool_free")
        torch.cuda.memory.change_current_allocator(other)
        with self.assertRaisesRegex(RuntimeError, "did not accept another allocator"):
            warpool.torch.enable()
        self.assertFalse(warpool.torch.enabled())

    @isolated
    def test_missing_pytorch_is_an_error(self) -> None:
        with mock.patch.dict(sys.modules, {"torch": None}):
            with self.assertRaisesRegex(ImportError, "PyTorch is not installed"):
                warpool.torch.enable()

    @isolated
    def test_pytorch_without_cuda_is_an_error(self) -> None:
        fake_torch().version.cuda = None
        with self.assertRaisesRegex(RuntimeError, "built without CUDA"):
            warpool.torch.enable()

    @isolated
    def test_simulated_driver_with_a_real_gpu_is_an_error(self) -> None:
        fake_torch().cuda.is_available = lambda: True
        with self.assertRaisesRegex(RuntimeError, "WARPOOL_DRIVER"):
            warpool.torch.enable()

    @isolated
    def test_unknown_driver_is_an_error(self) -> None:
        torch = fake_torch()
        os.environ["WARPOOL_DRIVER"] = "abacus"
        with self.assertRaisesRegex(warpool.Error, "abacus"):
            warpool.torch.enable()
        self.assertEqual(torch._C._cuda_memoryStats(0), "native")


class Backends(unittest.TestCase):
    @isolated
    def test_native_places_memory_as_pytorch(self) -> None:
        torch = fake_torch()
        warpool.torch.enable("backend:native")
        torch.allocate(4 * MIB)
        self.assertEqual(torch.cuda.memory_reserved(), 20 * MIB)
        with self.assertRaisesRegex(warpool.Error, "choose backend:paged"):
            warpool.torch.page_stats()

    @isolated
    def test_expandable_has_one_segment(self) -> None:
        torch = fake_torch()
        warpool.torch.enable("backend:expandable")
        torch.allocate(4 * MIB), torch.allocate(30 * MIB)
        (segment,) = torch.cuda.memory_snapshot()
        self.assertTrue(segment["is_expandable"])
        self.assertIn("expandable_segments:True", warpool.torch.settings())

    @isolated
    def test_paged_reserves_what_is_allocated(self) -> None:
        torch = fake_torch()
        warpool.torch.enable("backend:paged")
        self.assertEqual(warpool.torch.settings(), "backend:paged")
        torch.cuda.memory._record_memory_history(max_entries=100)
        kept, freed = torch.allocate(4 * MIB), torch.allocate(60 * MIB)
        torch.release(freed, 60 * MIB)
        self.assertEqual(torch.cuda.memory_reserved(), 64 * MIB)
        stats = warpool.torch.page_stats()
        self.assertEqual((stats["active_bytes"], stats["free_mapped_bytes"]), (4 * MIB, 60 * MIB))
        self.assertEqual(warpool.torch.page_stats(0), stats)
        snapshot = torch.cuda.memory._snapshot()
        self.assertEqual(sum(segment["total_size"] for segment in snapshot["segments"]), 64 * MIB)
        allocs = [entry for entry in snapshot["device_traces"][0] if entry["action"] == "alloc"]
        self.assertEqual([entry["addr"] for entry in allocs], [kept, freed])
        torch._C._cuda_setMemoryFraction(0.5, 0)
        torch.cuda.empty_cache()
        self.assertEqual(torch.cuda.memory_reserved(), 4 * MIB)
        warpool.torch.set_settings("paged_slack:1")
        self.assertEqual(warpool.torch.settings(), "backend:paged,paged_slack:1")
        with self.assertRaisesRegex(warpool.Error, "cannot be changed"):
            warpool.torch.set_settings("backend:native")

    @isolated
    def test_environment_chooses_a_backend(self) -> None:
        torch = fake_torch()
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "backend:paged"
        warpool.torch.enable()
        torch.allocate(4 * MIB)
        self.assertEqual(warpool.torch.page_stats()["reserved_bytes"], 4 * MIB)

    @isolated
    def test_default_backend_gives_way_to_a_named_one(self) -> None:
        fake_torch()
        os.environ["WARPOOL_CONF"] = "backend:native"
        warpool.torch.enable()
        self.assertEqual(warpool.torch.settings(), "")

    @isolated
    def test_default_backend(self) -> None:
        fake_torch()
        warpool.torch.enable()
        self.assertEqual(warpool.torch.settings(), "backend:paged")


class Settings(unittest.TestCase):
    @isolated
    def test_argument_takes_precedence_over_the_environment(self) -> None:
        fake_torch()
        os.environ["WARPOOL_CONF"] = "max_split_size_mb:64"
        warpool.torch.enable("max_split_size_mb:200")
        self.assertIn("max_split_size_mb:200", warpool.torch.settings())
        self.assertEqual(os.environ["WARPOOL_CONF"], "max_split_size_mb:64")
        warpool.torch.set_settings("max_split_size_mb:128")
        self.assertIn("max_split_size_mb:128", warpool.torch.settings())

    @isolated
    def test_argument_comes_on_top_of_pytorchs_variable(self) -> None:
        fake_torch()
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "backend:cudaMallocAsync,pinned_cap_mb:64"
        warpool.torch.enable("backend:native,expandable_segments:True")
        self.assertEqual(warpool.torch.settings(), "expandable_segments:True,pinned_cap_mb:64")

    @isolated
    def test_backend_keeps_expandable_segments_of_pytorchs_variable(self) -> None:
        fake_torch()
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        warpool.torch.enable("backend:native")
        self.assertEqual(warpool.torch.settings(), "expandable_segments:True")

    @isolated
    def test_argument_applies_if_the_library_is_started_already(self) -> None:
        fake_torch()
        warpool.torch.set_settings("max_split_size_mb:64")
        warpool.torch.enable("max_split_size_mb:200")
        self.assertIn("max_split_size_mb:200", warpool.torch.settings())

    @isolated
    def test_invalid_settings_leave_pytorch_unchanged(self) -> None:
        torch = fake_torch()
        with self.assertRaisesRegex(warpool.Error, "no_such_key"):
            warpool.torch.enable("no_such_key:1")
        self.assertNotIn("WARPOOL_CONF", os.environ)
        self.assertFalse(warpool.torch.enabled())
        self.assertEqual(torch._C._cuda_memoryStats(0), "native")
        warpool.torch.enable("max_split_size_mb:200")
        self.assertTrue(warpool.torch.enabled())

    @isolated
    def test_settings_through_pytorchs_own_function(self) -> None:
        torch = fake_torch()
        warpool.torch.enable()
        conf = "max_split_size_mb:200,pinned_num_register_threads:4, pinned_cap_mb:100"
        torch._C._accelerator_setAllocatorSettings(conf)
        self.assertIn("max_split_size_mb:200", warpool.torch.settings())
        self.assertIn("pinned_cap_mb:100", warpool.torch.settings())
        self.assertEqual(torch._C.settings_received, ["pinned_num_register_threads:4"])
        torch._C._accelerator_setAllocatorSettings("pinned_device_cap_mb:50")
        self.assertEqual(torch._C.settings_received, ["pinned_num_register_threads:4"])

    @isolated
    def test_argument_after_the_start_adds_to_the_settings(self) -> None:
        fake_torch()
        warpool.torch.set_settings("expandable_segments:True")
        warpool.torch.enable("max_split_size_mb:200")
        self.assertIn("expandable_segments:True", warpool.torch.settings())
        self.assertIn("max_split_size_mb:200", warpool.torch.settings())


class Bindings(unittest.TestCase):
    @isolated
    def test_statistics_are_nested_as_in_pytorch(self) -> None:
        torch = fake_torch()
        warpool.torch.enable()
        torch.allocate(10 * MIB)
        nested = torch._C._cuda_memoryStats(0)
        for name in ("allocation", "segment", "active", "inactive_split"):
            for group in (nested[name], nested.get(f"{name}_bytes", nested[name])):
                self.assertEqual(set(group), {"all", "small_pool", "large_pool"})
                for pool in group.values():
                    self.assertEqual(set(pool), {"current", "peak", "allocated", "freed"})
        for name in ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes"):
            self.assertEqual(nested[name]["all"]["current"], nested[name]["large_pool"]["current"])
        for name in ("oversize_allocations", "oversize_segments"):
            self.assertEqual(set(nested[name]), {"current", "peak", "allocated", "freed"})
        counts = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")
        for name in (*counts, "max_split_size"):
            self.assertIsInstance(nested[name], int)
        self.assertEqual(torch.accelerator.memory_stats(0), nested)

    @isolated
    def test_resets_and_fractions(self) -> None:
        torch = fake_torch()
        warpool.torch.enable()
        torch.release(torch.allocate(2 * MIB), 2 * MIB)
        torch._C._cuda_resetPeakMemoryStats(0)
        torch._C._accelerator_resetAccumulatedStats(0)
        stats = torch.cuda.memory_stats()
        self.assertEqual((stats["allocated_bytes.all.peak"], stats["allocated_bytes.all.allocated"]), (0, 0))
        torch._C._cuda_setMemoryFraction(0.5, 0)
        self.assertEqual(torch._C._cuda_getMemoryFraction(0), 0.5)
        torch.cuda.empty_cache()
        self.assertEqual(torch.cuda.memory_reserved(), 0)

    @isolated
    def test_snapshots_with_history_and_stacks(self) -> None:
        torch = fake_torch()
        warpool.torch.enable()
        self.assertFalse(torch._C._cuda_isHistoryEnabled())
        torch.cuda.memory._record_memory_history(max_entries=100)
        self.assertTrue(torch._C._cuda_isHistoryEnabled())
        torch._C._cuda_setMemoryMetadata("here")
        self.assertEqual(torch._C._cuda_getMemoryMetadata(), "here")
        torch.allocate(10 * MIB)
        snapshot = torch.cuda.memory._snapshot()
        self.assertEqual(sum(segment["total_size"] for segment in snapshot["segments"]), torch.cuda.memory_reserved())
        (alloc,) = [entry for entry in snapshot["device_traces"][0] if entry["action"] == "alloc"]
        self.assertEqual(alloc["user_metadata"], "here")
        names = [frame["name"] for frame in alloc["frames"]]
        self.assertIn("test_snapshots_with_history_and_stacks", names)
        self.assertFalse(any("/warpool/_" in frame["filename"] for frame in alloc["frames"]))
        self.assertEqual(len(torch.cuda.memory_snapshot()), 1)
        self.assertEqual(torch.cuda.memory_snapshot((7, 7)), [])
        self.assertEqual(torch._C._cuda_memorySnapshot((0, 0, False))["device_traces"][0], [])
        torch.cuda.memory._record_memory_history(None)
        self.assertFalse(torch._C._cuda_isHistoryEnabled())
        self.assertEqual(torch.cuda.memory._snapshot()["device_traces"][0], [])

    @isolated
    def test_context_selects_which_entries_have_stacks(self) -> None:
        torch = fake_torch()
        warpool.torch.enable()

        def the_alloc() -> int:
            return torch.allocate(MIB)

        def the_free(ptr: int) -> None:
            torch.release(ptr, MIB)

        def caller(entry: Dict[str, Any]) -> Optional[str]:
            names = [frame["name"] for frame in entry.get("frames", ())]
            return next((name for name in names if name in ("the_alloc", "the_free")), None)

        cases = {
            None: (None, None),
            "state": (None, None),
            "alloc": ("the_alloc", "the_alloc"),
            "all": ("the_alloc", "the_free"),
        }
        for context, expected in cases.items():
            torch.cuda.memory._record_memory_history(None)
            torch.cuda.memory._record_memory_history(context=context)
            the_free(the_alloc())
            (trace, *_) = torch.cuda.memory._snapshot()["device_traces"]
            callers = {entry["action"]: caller(entry) for entry in trace}
            self.assertEqual((callers["alloc"], callers["free_requested"]), expected, context)

    @isolated
    def test_older_history_signature(self) -> None:
        torch = fake_torch()
        warpool.torch.enable()
        torch._C._cuda_record_memory_history_legacy(True, True, 100, True, False, False, False, False, [])
        torch.allocate(MIB)
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        self.assertTrue(trace[-1]["frames"])

    @isolated
    def test_invalid_history_arguments_are_named(self) -> None:
        torch = fake_torch()
        warpool.torch.enable()
        for named in ({"enabled": "some"}, {"context": "some"}, {"stacks": "some"}, {"skip": ["some"]}):
            with self.assertRaisesRegex(RuntimeError, "some"):
                torch.cuda.memory._record_memory_history(**named)

    @isolated
    def test_unsupported_history_arguments_warn(self) -> None:
        torch = fake_torch()
        warpool.torch.enable()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch._C._cuda_record_memory_history("all", "all", "all", 100, False, True, False, [])
        self.assertIn("compile_context", str(caught[0].message))


class Unsupported(unittest.TestCase):
    @isolated
    def test_each_error_says_what_to_do(self) -> None:
        torch = fake_torch()
        warpool.torch.enable()
        for call, advice in (
            (torch.cuda.MemPool, "torch.cuda.graph"),
            (lambda: torch.cuda.use_mem_pool(mock.Mock(id=(0, 1))), "torch.cuda.graph"),
            (lambda: torch._C._cuda_beginAllocateCurrentThreadToPool(0, (0, 1)), "cudagraph_trees = False"),
            (lambda: torch._C._cuda_getCheckpointState(0, (0, 1)), "cudagraph_trees = False"),
            (lambda: torch._C._cuda_setCheckpointPoolState(0, None, [], []), "cudagraph_trees = False"),
            (lambda: torch._C._cuda_checkPoolLiveAllocations(0, (0, 1), set()), "cudagraph_trees = False"),
            (torch.UntypedStorage()._share_cuda_, "torch.distributed"),
            (lambda: torch.UntypedStorage._new_shared_cuda(0, b""), "torch.distributed"),
            (lambda: torch._C._cuda_attach_out_of_memory_observer(print), "OutOfMemoryError"),
            (lambda: torch._C._cuda_cudaCachingAllocator_enable(False), "PYTORCH_NO_CUDA_MEMORY_CACHING"),
        ):
            with self.assertRaisesRegex(RuntimeError, "(?s)not possible with Warpool.*" + advice):
                call()
        torch._C._cuda_cudaCachingAllocator_enable(True)

    @isolated
    def test_cudnn_benchmark_stays_off(self) -> None:
        torch = fake_torch()
        torch.backends.cudnn.benchmark = True
        with self.assertWarnsRegex(RuntimeWarning, "benchmark stays off"):
            warpool.torch.enable()
        self.assertFalse(torch.backends.cudnn.benchmark)
        by_attribute, by_binding = (
            lambda: setattr(torch.backends.cudnn, "benchmark", True),
            lambda: torch._C._set_cudnn_benchmark(True),
        )
        for switch_on in (by_attribute, by_binding):
            with self.assertWarnsRegex(RuntimeWarning, "benchmark stays off"):
                switch_on()
            self.assertFalse(torch.backends.cudnn.benchmark)
        torch.backends.cudnn.benchmark = False
        with self.assertRaises(TypeError):
            torch.backends.cudnn.benchmark = "yes"

    @isolated
    def test_warning_raised_as_an_error_changes_nothing(self) -> None:
        torch = fake_torch()
        torch.backends.cudnn.benchmark = True
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with self.assertRaisesRegex(RuntimeWarning, "benchmark stays off"):
                warpool.torch.enable()
        self.assertFalse(warpool.torch.enabled())
        self.assertEqual(torch._C._cuda_memoryStats(0), "native")
        self.assertTrue(torch.backends.cudnn.benchmark)
        torch.backends.cudnn.benchmark = False
        warpool.torch.enable()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with self.assertRaises(RuntimeWarning):
                torch.backends.cudnn.benchmark = True
        self.assertFalse(torch.backends.cudnn.benchmark)

    @isolated
    def test_missing_names_in_pytorch_are_skipped(self) -> None:
        torch = fake_torch()
        del torch.cuda.memory.MemPool, torch.cuda.memory._cuda_beginAllocateCurrentThreadToPool
        del torch.UntypedStorage._share_cuda_, torch.UntypedStorage._new_shared_cuda
        warpool.torch.enable()
        torch.allocate(MIB)
        self.assertEqual(torch.cuda.memory_allocated(), MIB)
        self.assertFalse(hasattr(torch.UntypedStorage, "_share_cuda_"))

    @isolated
    def test_missing_type_in_pytorch_changes_nothing(self) -> None:
        torch = fake_torch()
        del torch.UntypedStorage
        with self.assertRaises(AttributeError):
            warpool.torch.enable()
        self.assertFalse(warpool.torch.enabled())
        self.assertEqual(torch._C._cuda_memoryStats(0), "native")
        torch.allocate(MIB)


if __name__ == "__main__":
    os.environ["WARPOOL_DRIVER"] = "sim"
    unittest.main()
