"""Tests of `warpool.torch.enable` with a fake of PyTorch and of a backend (`fake_torch`), on the simulated GPU."""

import os
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from fake_torch import backend, fake_torch
from isolated import isolated
from memory import malloc, stats

import warpool
import warpool.torch
from warpool import _backend

MIB = 1 << 20


class WithBackend(unittest.TestCase):
    """A folder with a backend, which `enable` uses."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        environment = mock.patch.dict(os.environ, {"WARPOOL_BACKEND": backend(self.folder)})
        environment.start()
        self.addCleanup(environment.stop)


class Enable(WithBackend):
    @isolated
    def test_backend_is_installed_once(self) -> None:
        fake_torch()
        self.assertFalse(warpool.torch.enabled())
        warpool.torch.enable()
        self.assertTrue(warpool.torch.enabled())
        with self.assertRaisesRegex(RuntimeError, "called before.*set_settings"):
            warpool.torch.enable()
        self.assertTrue(warpool.torch.enabled())

    @isolated
    def test_enable_after_cuda_is_in_use_is_an_error(self) -> None:
        fake_torch().cuda.is_initialized = lambda: True
        with self.assertRaisesRegex(RuntimeError, "too late.*right after `import torch`"):
            warpool.torch.enable()
        self.assertFalse(warpool.torch.enabled())

    @isolated
    def test_refused_backend_is_an_error(self) -> None:
        fake_torch()
        os.environ["WARPOOL_BACKEND"] = backend(self.folder, install_fails=1)
        with self.assertRaisesRegex(RuntimeError, "did not accept another allocator: CUDA is in use already"):
            warpool.torch.enable()
        self.assertFalse(warpool.torch.enabled())

    @isolated
    def test_backend_for_another_version_is_an_error_and_enable_can_be_repeated(self) -> None:
        fake_torch()
        for versions, why in (
            ({"torch": "2.3.0"}, "was built for PyTorch 2.3.0"),
            ({"interface": "0.0.1"}, "was built for Warpool 0.0.1"),
        ):
            with mock.patch.dict(os.environ, {"WARPOOL_BACKEND": backend(self.folder, **versions)}):
                with self.assertRaisesRegex(RuntimeError, why):
                    warpool.torch.enable()
            self.assertFalse(warpool.torch.enabled())
        warpool.torch.enable()
        self.assertTrue(warpool.torch.enabled())

    @isolated
    def test_without_backend_and_compiler_the_error_says_what_to_do(self) -> None:
        torch = fake_torch()
        del os.environ["WARPOOL_BACKEND"]
        os.environ["CXX"] = "no-such-compiler"
        _backend._READY = self.folder
        for name in ("2.9", "2.10"):
            (self.folder / f"libwarpool_backend-{name}.so").touch()
        why = "no backend for PyTorch 2.11.0.*no C\\+\\+ compiler.*set CXX.*torch build.*for PyTorch 2.9, 2.10"
        with self.assertRaisesRegex(warpool.Error, why):
            warpool.torch.enable()
        self.assertFalse(warpool.torch.enabled())
        torch.__version__ = "2.8.1"
        with self.assertRaisesRegex(warpool.Error, "no backend for PyTorch 2.8.1.*written for 2.9 to 2.15"):
            warpool.torch.enable()

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
        fake_torch()
        os.environ["WARPOOL_DRIVER"] = "abacus"
        with self.assertRaisesRegex(warpool.Error, "abacus"):
            warpool.torch.enable()


class Allocators(WithBackend):
    @isolated
    def test_default(self) -> None:
        fake_torch()
        warpool.torch.enable()
        self.assertEqual(warpool.torch.settings(), "backend:paged")
        malloc(4 * MIB)
        self.assertEqual(stats()["reserved_bytes.all.current"], 4 * MIB)
        self.assertEqual(warpool.torch.page_stats()["active_bytes"], 4 * MIB)
        self.assertEqual(warpool.torch.page_stats(0), warpool.torch.page_stats())
        with self.assertRaisesRegex(warpool.Error, "cannot be changed"):
            warpool.torch.set_settings("backend:native")

    @isolated
    def test_argument_chooses_another(self) -> None:
        fake_torch()
        warpool.torch.enable("backend:native")
        malloc(4 * MIB)
        self.assertEqual(stats()["reserved_bytes.all.current"], 20 * MIB)
        with self.assertRaisesRegex(warpool.Error, "choose backend:paged"):
            warpool.torch.page_stats()

    @isolated
    def test_environment_chooses_another(self) -> None:
        fake_torch()
        os.environ["WARPOOL_CONF"] = "backend:native"
        warpool.torch.enable()
        self.assertEqual(warpool.torch.settings(), "")


class Settings(WithBackend):
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
    def test_invalid_settings_change_nothing(self) -> None:
        fake_torch()
        with self.assertRaisesRegex(warpool.Error, "no_such_key"):
            warpool.torch.enable("no_such_key:1")
        self.assertNotIn("WARPOOL_CONF", os.environ)
        self.assertFalse(warpool.torch.enabled())
        warpool.torch.enable("max_split_size_mb:200")
        self.assertTrue(warpool.torch.enabled())

    @isolated
    def test_argument_after_the_start_adds_to_the_settings(self) -> None:
        fake_torch()
        warpool.torch.set_settings("expandable_segments:True")
        warpool.torch.enable("max_split_size_mb:200")
        self.assertIn("expandable_segments:True", warpool.torch.settings())
        self.assertIn("max_split_size_mb:200", warpool.torch.settings())


if __name__ == "__main__":
    os.environ["WARPOOL_DRIVER"] = "sim"
    unittest.main()
