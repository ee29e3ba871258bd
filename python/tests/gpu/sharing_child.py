"""The other process of the scenario `sharing`."""

import gc
from typing import Any

import child
import torch


def main(allocator: str, to_child: Any, to_parent: Any) -> None:
    """Reads and changes the tensors that it gets, tells what it read, and sends a tensor of its own."""
    child.enable(allocator)
    tensors = to_child.get(timeout=60)
    to_parent.put([float(tensor.double().sum()) for tensor in tensors])
    for tensor in tensors:
        tensor.fill_(-1.0)
    torch.cuda.synchronize()
    own = torch.full((MIB_FLOATS,), 3.0, device="cuda")
    torch.cuda.synchronize()
    del tensors, tensor
    gc.collect()
    to_parent.put(own)
    # The other side is done with it.
    to_child.get(timeout=60)


MIB_FLOATS = 1 << 18
