"""Which kernel `scaled_dot_product_attention` uses on a card, as PyTorch chooses it.

PyTorch asks the device in C++ before any operator is called, so the choice is made here: on Hopper and
datacenter Blackwell cuDNN's kernel if it can run; else flash attention, the memory-efficient kernel, plain operators.
"""

import math
from typing import Any, Optional

import torch
from torch._subclasses.fake_tensor import FakeTensor

from . import _cards


def attention(recorder: Any, card: _cards.Card, original: Any) -> Any:
    """The function for this card."""

    def run(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: Optional[float] = None,
        enable_gqa: bool = False,
    ) -> Any:
        if not isinstance(query, FakeTensor) or query.fake_device.type != "cuda":
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")

            def cast(each: Any) -> Any:
                return each.to(dtype) if each.dtype.is_floating_point and each.dtype != torch.float64 else each

            query, key, value = cast(query), cast(key), cast(value)
            if attn_mask is not None:
                attn_mask = cast(attn_mask)
        with torch.autocast("cuda", enabled=False):
            return chosen(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    def chosen(
        query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool, scale: Any, grouped: bool
    ) -> Any:
        backends = torch.backends.cuda
        # Only plain operators take a mask whose rows are not contiguous, as a bias that was permuted.
        fused = mask is None or mask.stride(-1) == 1
        if fused and backends.cudnn_sdp_enabled() and cudnn_can(query, key, value, grouped):
            needs_grad = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
            return torch.ops.aten._scaled_dot_product_cudnn_attention(
                query, key, value, additive(mask, query), needs_grad, dropout, causal, False, scale=scale
            )[0]
        if backends.flash_sdp_enabled() and flash_can(query, key, value, mask, grouped):
            width = query.size(-1)
            scale = 1 / math.sqrt(width) if scale is None else scale
            query, key, value = (padded(each, 8) for each in (query, key, value))
            out = torch.ops.aten._scaled_dot_product_flash_attention(
                query, key, value, dropout, causal, False, scale=scale
            )[0]
            return out if out.size(-1) == width else out[..., :width]
        if fused and backends.mem_efficient_sdp_enabled() and efficient_can(query, key, value, mask, grouped):
            needs_grad = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
            mask = bias(mask, query, key)
            return torch.ops.aten._scaled_dot_product_efficient_attention(
                query, key, value, mask, needs_grad, dropout, causal, scale=scale
            )[0]
        return torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, mask, dropout, causal, None, scale=scale, enable_gqa=grouped
        )[0]

    def shapes_agree(query: Any, key: Any, value: Any, grouped: bool) -> bool:
        if not query.dim() == key.dim() == value.dim() == 4:
            return False
        if any(each.size(-1) and each.stride(-1) != 1 for each in (query, key, value)):
            return False
        if not query.size(0) == key.size(0) == value.size(0):
            return False
        if 0 in (query.size(2), key.size(2)):
            return False
        heads = (query.size(1), key.size(1), value.size(1))
        if grouped:
            return heads[1] == heads[2] and heads[0] % heads[1] == 0
        return heads[0] == heads[1] == heads[2]

    def cudnn_can(query: Any, key: Any, value: Any, grouped: bool) -> bool:
        if card.capability not in ((9, 0), (10, 0)) or query.dtype not in (torch.float16, torch.bfloat16):
            return False
        if not shapes_agree(query, key, value, grouped):
            return False
        most = 256 if card.capability == (9, 0) else 128
        return all(each.size(-1) % 8 == 0 and each.size(-1) <= most for each in (query, value))

    def flash_can(query: Any, key: Any, value: Any, mask: Any, grouped: bool) -> bool:
        if card.capability[0] < 8 or mask is not None or query.dtype not in (torch.float16, torch.bfloat16):
            return False
        if not shapes_agree(query, key, value, grouped):
            return False
        width = query.size(-1)
        return width <= 256 and width == key.size(-1) == value.size(-1)

    def efficient_can(query: Any, key: Any, value: Any, mask: Any, grouped: bool) -> bool:
        if grouped or card.capability[0] < 5 or not shapes_agree(query, key, value, False):
            return False
        half = query.dtype == torch.float16 or (query.dtype == torch.bfloat16 and card.capability[0] >= 8)
        if not half and query.dtype != torch.float32:
            return False
        unit = 8 if half else 4
        if query.size(-1) % unit or value.size(-1) % unit or query.size(-1) != key.size(-1):
            return False
        return mask is None or mask.dtype in (torch.bool, query.dtype)

    def additive(mask: Any, query: Any) -> Any:
        if mask is None or mask.dtype != torch.bool:
            return mask
        made = torch.zeros_like(mask, dtype=query.dtype)
        made.masked_fill_(mask.logical_not(), float("-inf"))
        return made

    def bias(mask: Any, query: Any, key: Any) -> Any:
        """The mask as the kernel takes it: added to the scores, with rows that are aligned."""
        if mask is None:
            return None
        mask = additive(mask, query)
        shape = (query.size(0), query.size(1), query.size(2), key.size(2))
        if mask.size(-1) % 16 or mask.size(-1) == 1 and key.size(2) != 1:
            last = key.size(2)
            room = -(-last // 16) * 16 - last
            expanded = mask.expand(*mask.shape[:-1], last)
            if room:
                expanded = torch.nn.functional.pad(expanded, (0, room))[..., :last]
            mask = expanded
        return mask.expand(shape)

    def padded(tensor: Any, unit: int) -> Any:
        room = -tensor.size(-1) % unit
        return torch.nn.functional.pad(tensor, (0, room)) if room else tensor

    return run
