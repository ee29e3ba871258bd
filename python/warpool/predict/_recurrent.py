"""LSTM, GRU and RNN as cuDNN runs them: the functions of C++ ask the device first."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}


def recurrent(name: str, original: Any) -> Any:
    """The function of that name; on CUDA tensors it calls the operator of cuDNN."""

    def run(data: Any, *args: Any) -> Any:
        if not isinstance(data, FakeTensor) or data.fake_device.type != "cuda":
            return original(data, *args)
        if isinstance(args[1], (list, tuple)) and name == "lstm" and isinstance(args[0], torch.Tensor):
            return packed(data, *args)
        if name != "lstm" and isinstance(args[0], torch.Tensor) and isinstance(args[1], torch.Tensor):
            return packed(data, *args)
        hidden, weights, has_biases, layers, dropout, train, bidirectional, batch_first = args
        return call(data, [], hidden, weights, has_biases, layers, dropout, train, bidirectional, batch_first)

    def packed(data: Any, sizes: Any, hidden: Any, weights: Any, has_biases: Any, *rest: Any) -> Any:
        layers, dropout, train, bidirectional = rest
        sizes = [int(size) for size in sizes.tolist()]
        return call(data, sizes, hidden, weights, has_biases, layers, dropout, train, bidirectional, False)

    def call(data: Any, sizes: Any, hidden: Any, weights: Any, has_biases: Any, layers: int, dropout: float,
             train: bool, bidirectional: bool, batch_first: bool) -> Any:
        state, cell = (hidden[0], hidden[1]) if name == "lstm" else (hidden, None)
        weights = list(weights)
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            data, state = data.to(dtype), state.to(dtype)
            cell = None if cell is None else cell.to(dtype)
            weights = [weight.to(dtype) for weight in weights]
        stride = len(weights) // (layers * (2 if bidirectional else 1))
        # With projections the state is smaller than the cell.
        size = weights[1].size(1) if cell is None else cell.size(2)
        projection = state.size(2) if cell is not None and state.size(2) != cell.size(2) else 0
        with torch.autocast("cuda", enabled=False):
            out, state, cell, _, _ = torch._cudnn_rnn(
                data, weights, stride, None, state, cell, _MODES[name], size, projection, layers, batch_first, dropout,
                train, bidirectional, sizes, None,
            )
        return (out, state, cell) if name == "lstm" else (out, state)

    return run
