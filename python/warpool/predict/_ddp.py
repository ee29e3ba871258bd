"""DistributedDataParallel's reducer, as far as memory goes: buckets for gradients.

PyTorch's is C++ and times itself with CUDA events. Here are its buckets: allocated when the module is wrapped, and
again, in the order in which gradients arrive, at the second forward pass. Communication takes no memory here.
"""

from typing import Any, List

import torch
import torch.distributed as dist


class Reducer:
    """In place of `torch.distributed.Reducer`."""

    def __init__(
        self,
        params: Any,
        bucket_indices: Any,
        size_limits: Any,
        group: Any,
        expect_sparse: Any = None,
        bucket_bytes_cap: int = 25 << 20,
        find_unused: bool = False,
        as_views: bool = False,
        names: Any = None,
        first_bytes_cap: int = 1 << 20,
        *_: Any,
        **__: Any,
    ) -> None:
        self._params = list(params)
        self._limits = [first_bytes_cap, bucket_bytes_cap]
        self._as_views, self._may_rebuild = as_views, not find_unused
        self._arrived: List[int] = []
        self._number = {id(parameter): number for number, parameter in enumerate(self._params)}
        self._allocate(bucket_indices)
        for parameter in self._params:
            parameter.register_post_accumulate_grad_hook(self._ready)

    def _allocate(self, indices: Any) -> None:
        self._views = {}
        with torch.no_grad():
            for bucket in indices:
                members = [self._params[number] for number in bucket]
                whole = torch.empty(
                    sum(each.numel() for each in members), dtype=members[0].dtype, device=members[0].device
                )
                offset = 0
                for number, each in zip(bucket, members):
                    self._views[number] = whole.as_strided(each.size(), each.stride(), offset)
                    offset += each.numel()

    def _ready(self, parameter: Any) -> None:
        number = self._number[id(parameter)]
        if self._may_rebuild:
            self._arrived.append(number)
        if self._as_views:
            parameter.grad = self._views[number]

    def _rebuild_buckets(self) -> bool:
        if not self._may_rebuild or len(self._arrived) < len(self._params):
            return False
        self._may_rebuild = False
        order = list(dict.fromkeys(self._arrived))
        indices, _ = dist._compute_bucket_assignment_by_size(
            [self._params[number] for number in order], self._limits, [False] * len(order), order
        )
        self._allocate(indices)
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


class Logger:
    """In place of `torch.distributed.Logger`, which needs PyTorch's reducer."""

    def __init__(self, *_: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None
