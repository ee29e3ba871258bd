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

    def call(
        data: Any,
        sizes: Any,
        hidden: Any,
        weights: Any,
        has_biases: Any,
        layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        state, cell = (hidden[0], hidden[1]) if name == "lstm" else (hidden, None)
        weights = list(weights)
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            data, state = data.to(dtype), state.to(dtype)
            cell = None if cell is None else cell.to(dtype)
            weights, buffer = flattened(weights, dtype)
        elif len({weight.untyped_storage()._cdata for weight in weights}) == 1:
            with torch.no_grad():
                whole = weights[0].untyped_storage().nbytes() // weights[0].element_size()
                buffer = weights[0].detach().as_strided((whole,), (1,), 0)
        else:
            buffer = None
        stride = len(weights) // (layers * (2 if bidirectional else 1))
        # With projections the state is smaller than the cell.
        size = weights[1].size(1) if cell is None else cell.size(2)
        projection = state.size(2) if cell is not None and state.size(2) != cell.size(2) else 0
        with torch.autocast("cuda", enabled=False):
            out, state, cell, _, _ = torch._cudnn_rnn(
                data,
                weights,
                stride,
                buffer,
                state,
                cell,
                _MODES[name],
                size,
                projection,
                layers,
                batch_first,
                dropout,
                train,
                bidirectional,
                sizes,
                None,
            )
        return (out, state, cell) if name == "lstm" else (out, state)

    def flattened(weights: Any, dtype: Any) -> Any:
        """Copies in one buffer, as autocast makes them."""
        buffer = torch.empty(sum(weight.numel() for weight in weights), dtype=dtype, device=weights[0].device)
        copies, offset = [], 0
        for weight in weights:
            copy = buffer[offset : offset + weight.numel()].view(weight.shape)
            copies.append(copy.copy_(weight))
            offset += weight.numel()
        return copies, buffer.detach()

    return run


def _like(tensor: Any) -> Any:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _sized(tensor: Any, *shape: int) -> Any:
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)


def _rnn(args: Any) -> Any:
    """As PyTorch's shape function, with the reserve, which is empty there: what cuDNN keeps for the backward pass. The
    output has the steps first in memory."""
    out, state, cell, reserve, buffer = torch.ops.aten._cudnn_rnn.default(*args)
    data, mode, size, projection, layers, batch_first, dropout, train, bidirectional, sizes = args[0], *args[6:15]
    if batch_first and not sizes:
        out = out.new_empty(out.size(1), out.size(0), out.size(2)).transpose(0, 1)
    if train:
        if sizes:
            rows, padded = data.size(0), len(sizes) * sizes[0]
        else:
            rows = padded = data.size(0) * data.size(1)
        count = reserve_bytes(
            _MODE_NAMES[mode],
            rows,
            padded,
            size,
            projection or size,
            layers,
            2 if bidirectional else 1,
            data.element_size(),
            dropout,
        )
        reserve = reserve.new_empty(count)
    return out, state, cell, reserve, buffer


# Values that an element of the state keeps: the gates, the cell, and for a GRU two more.
_KEPT = {"lstm": 5, "gru": 6, "rnn_tanh": 1, "rnn_relu": 1}
_MODE_NAMES = {mode: name for name, mode in _MODES.items()}


def reserve_bytes(
    name: str,
    rows: int,
    padded: int,
    hidden: int,
    output: int,
    layers: int,
    directions: int,
    itemsize: int,
    dropout: float,
) -> int:
    """cuDNN's reserve; exact for all 100 trainings that were measured on an H200 (cuDNN 9.19), none with projections.

    Args:
        rows: Steps of all sequences.
        padded: The same, as if all sequences were as long as the longest: dropout's masks, of bits, are for these.
        output: The size of the state, which is that of a projection if there is one.
    """
    kept = _KEPT[name] * layers * directions * rows * hidden * itemsize
    between = (layers - 1) * directions * rows * output * itemsize
    masks = (layers - 1) * directions**2 * padded * output // 8 if dropout else 0
    return kept + between + masks + 256


def _rnn_backward(args: Any) -> Any:
    """The gradients of all weights are views of one buffer."""
    data, weights, buffer, state, cell = args[0], args[1], args[3], args[4], args[5]
    whole = _sized(buffer, buffer.numel())
    gradients, offset = [], 0
    for weight in weights:
        gradients.append(torch.as_strided(whole, weight.size(), weight.stride(), offset))
        offset += weight.numel()
    return _like(data), _like(state), None if cell is None else _like(cell), gradients


def _lstm_cell_backward(args: Any) -> Any:
    cell, workspace, has_bias = args[2], args[4], args[5]
    return _like(workspace), _like(cell), _sized(workspace, workspace.size(-1)) if has_bias else None


def _gru_cell_backward(args: Any) -> Any:
    gradient, has_bias = args[0], args[2]
    batch, width = gradient.shape
    gates = [_sized(gradient, batch, 3 * width) for _ in range(2)]
    biases = [_sized(gradient, 3 * width) if has_bias else None for _ in range(2)]
    return (*gates, _like(gradient), *biases)


# Results of operators whose shapes PyTorch cannot tell without CUDA; called with the arguments, on tensors without
# memory.
SHAPES = {
    "_cudnn_rnn": _rnn,
    "_cudnn_rnn_backward": _rnn_backward,
    "_thnn_fused_lstm_cell": lambda args: (_like(args[2]), _like(args[2]), _like(args[0])),
    "_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "_thnn_fused_gru_cell": lambda args: (_like(args[2]), _sized(args[2], args[2].size(0), 5 * args[2].size(1))),
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
}
