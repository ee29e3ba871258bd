"""What a process takes of a card outside PyTorch's allocator: the context of CUDA, and what libraries add to it.

Measured on one card, for one driver and one version of CUDA, by `calibrate measure` (its line "constants"); which
libraries a program uses follows from its operators. This module needs no PyTorch.
"""

from typing import Any, Dict, List, Optional, Set, Tuple

MIB = 1 << 20
ORIGIN = "measured on an H200, driver 580.159, CUDA 13.0"

# The total less what is free after the first CUDA call.
CONTEXT_BYTES = 552_402_944

# What is loaded with the first kernel of PyTorch.
KERNELS = 92 * MIB
# A pool of streams, which PyTorch makes with the first one.
STREAMS = 70 * MIB
# Of a library: with its first use, and with the first use in every other thread, which has a handle of its own.
# Autograd's thread is one.
_LIBRARIES: Dict[str, Tuple[int, int]] = {
    "cuBLAS": (66 * MIB, 66 * MIB),
    "cuDNN": (12 * MIB, 4 * MIB),
    "cuFFT": (8 * MIB, 0),
    "cuSOLVER": (96 * MIB, 0),
}

_PRODUCTS = frozenset(
    "mm addmm bmm baddbmm addbmm mv addmv dot vdot _addmm_activation _scaled_mm _int_mm _grouped_mm _scaled_grouped_mm "
    "_trilinear".split()
)
_DECOMPOSITIONS = frozenset(
    "cholesky cholesky_inverse cholesky_solve geqrf ormqr orgqr lu_solve linalg_cholesky_ex linalg_inv_ex linalg_eig "
    "linalg_eigh _linalg_eigh _linalg_eigvals _linalg_svd _linalg_det _linalg_slogdet _linalg_solve_ex linalg_qr "
    "linalg_lu linalg_lu_factor_ex linalg_lu_solve linalg_ldl_factor_ex linalg_ldl_solve linalg_householder_product "
    "linalg_lstsq linalg_pinv linalg_matrix_exp".split()
)


def library(operator: str) -> Optional[str]:
    """The library that an ATen operator on CUDA tensors uses, if it is one of those that take memory."""
    name = operator.rstrip("_")
    if name in _PRODUCTS:
        return "cuBLAS"
    if "cudnn" in name or name in ("convolution", "convolution_backward", "_convolution"):
        return "cuDNN"
    if name.startswith("_fft_"):
        return "cuFFT"
    return "cuSOLVER" if name in _DECOMPOSITIONS else None


class Outside:
    """What a program has used so far."""

    def __init__(self) -> None:
        self._threads: Dict[Tuple[int, str], Set[str]] = {}
        self.kernels = False
        self.streams = False

    def use(self, name: str, device: int, thread: str) -> None:
        """A library is used."""
        self._threads.setdefault((device, name), set()).add(thread)

    def parts(self) -> List[Dict[str, Any]]:
        """What takes memory, on the device where it is most."""
        found = [{"name": "the context of CUDA", "bytes": CONTEXT_BYTES}]
        if self.kernels:
            found.append({"name": "PyTorch's kernels", "bytes": KERNELS})
        of: Dict[int, List[Dict[str, Any]]] = {}
        for (device, name), threads in self._threads.items():
            first, other = _LIBRARIES[name]
            count = len(threads)
            text = name if count == 1 else f"{name} in {count} threads"
            of.setdefault(device, []).append({"name": text, "bytes": first + (count - 1) * other})
        found += max(of.values(), key=lambda parts: sum(part["bytes"] for part in parts), default=[])
        if self.streams:
            found.append({"name": "a pool of streams", "bytes": STREAMS})
        return found

    @property
    def bytes(self) -> int:
        """All of it."""
        return sum(part["bytes"] for part in self.parts())
