"""`torch.distributed` with one process: the program is one rank of a group whose others are not there.

Groups have PyTorch's fake backend, which answers at once and moves nothing. Rank and size of the group are those that
were asked for, or those of torchrun's variables in the environment.
"""

import importlib
import os
import types
from typing import Any, Dict, List, Optional

import torch


class Place:
    """The rank that is predicted, and how many there are."""

    def __init__(self, rank: Optional[int], world_size: Optional[int], gpus: Optional[int]) -> None:
        environment = os.environ
        # Several cards alone may be for one process, such as a model of which each has some layers.
        self.asked = world_size is not None or rank is not None
        self.rank = int(environment.get("RANK", 0)) if rank is None else rank
        if world_size is None:
            world_size = int(environment.get("WORLD_SIZE", max(gpus or 1, self.rank + 1)))
        self.world_size = world_size
        # As on one node after another of so many cards.
        self.gpus = gpus or int(environment.get("LOCAL_WORLD_SIZE", min(world_size, 8)))

    def variables(self) -> Dict[str, str]:
        """What torchrun sets."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.rank % self.gpus),
            "LOCAL_WORLD_SIZE": str(self.gpus),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "29500",
        }


def patch(patches: Any, recorder: Any, place: Place) -> None:
    """Replaces how groups are made; the environment gets torchrun's variables where ranks were asked for."""
    if place.asked:
        for name, value in place.variables().items():
            _set_variable(patches, name, value)
    _patch_spawn(patches, recorder, place)
    dist = torch.distributed
    if not dist.is_available():
        return
    c10d = importlib.import_module("torch.distributed.distributed_c10d")
    meshes = importlib.import_module("torch.distributed.device_mesh")
    begin, more = c10d.init_process_group, c10d.new_group

    def init_process_group(
        backend: Any = None,
        init_method: Any = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
        group_name: str = "",
        pg_options: Any = None,
        device_id: Any = None,
        **_: Any,
    ) -> None:
        fake = importlib.import_module("torch.testing._internal.distributed.fake_pg")
        if world_size < 0 or place.asked:
            world_size = place.world_size
        if rank < 0 or place.asked:
            rank = place.rank
        recorder.remarks.add(
            f"torch.distributed: rank {rank} of {world_size} ran alone; collectives moved nothing, and NCCL's buffers "
            "are not counted"
        )
        begin("fake", rank=rank, world_size=world_size, store=fake.FakeStore(), group_name=group_name)
        recorder.on_end.append(end)

    def end() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *_: Any, **options: Any) -> Any:
        return more(ranks, backend="fake", group_desc=options.get("group_desc"))

    def gather_object(objects: List[Any], obj: Any, *_: Any, **__: Any) -> None:
        """The other ranks are taken to have the same."""
        if objects is not None:
            objects[:] = [obj] * len(objects)

    def object_for_all(obj: Any, objects: Any = None, *_: Any, **__: Any) -> None:
        gather_object(objects, obj)

    for module in (dist, c10d, meshes):
        for name, function in (
            ("init_process_group", init_process_group),
            ("new_group", new_group),
            ("all_gather_object", gather_object),
            ("gather_object", object_for_all),
            ("broadcast_object_list", lambda *_, **__: None),
        ):
            if hasattr(module, name):
                patches.set(module, name, function)


def _patch_spawn(patches: Any, recorder: Any, place: Place) -> None:
    """`torch.multiprocessing.spawn` of a process for each GPU: one of them runs, in this process."""

    def spawn(fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, *_: Any, **__: Any) -> Any:
        number = place.rank % max(nprocs, 1)
        recorder.remarks.add(f"torch.multiprocessing.spawn: process {number} of {nprocs} was predicted")
        fn(number, *args)
        return None if join else types.SimpleNamespace(join=lambda *_, **__: True, processes=[], pids=lambda: [])

    for name in ("spawn", "start_processes"):
        patches.set(importlib.import_module("torch.multiprocessing"), name, spawn)


def _set_variable(patches: Any, name: str, value: str) -> None:
    before = os.environ.get(name)
    os.environ[name] = value
    patches.on_undo(lambda: os.environ.pop(name, None) if before is None else os.environ.update({name: before}))
