"""The calls that `calibrate.py` measures: families of small programs, over shapes and dtypes.

A family is a function that yields (label, program); a program creates its inputs itself and computes something, with
`backward` where there is one. Shapes are drawn from a fixed seed, so a second run measures the same.

With `DEVICE = "cpu"` and fake tensors nothing is computed: that is how the programs are tested without a GPU.
"""

import contextlib
import random
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DEVICE = "cuda"
Program = Callable[[], Any]
Cases = Iterator[Tuple[str, Program]]
FAMILIES: Dict[str, Callable[[random.Random], Cases]] = {}
# How many processes measure a family.
PARTS: Dict[str, int] = {}

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
I64, I32, I16, I8, U8, BOOL = torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool


def family(parts: int = 1) -> Callable[[Callable[[random.Random], Cases]], Callable[[random.Random], Cases]]:
    """Registers a family."""

    def register(cases: Callable[[random.Random], Cases]) -> Callable[[random.Random], Cases]:
        FAMILIES[cases.__name__] = cases
        PARTS[cases.__name__] = parts
        return cases

    return register


def new(*shape: int, dtype: torch.dtype = F32, grad: bool = False, format: Optional[str] = None) -> Tensor:
    """A tensor of random numbers; `format` is a layout: channels_last, transposed (the last two), sliced."""
    if dtype is BOOL:
        return torch.randint(2, shape, device=DEVICE, dtype=BOOL)
    if not dtype.is_floating_point:
        return torch.randint(100, shape, device=DEVICE, dtype=dtype)
    if format == "transposed" and len(shape) > 1:
        made = torch.randn(*shape[:-2], shape[-1], shape[-2], device=DEVICE, dtype=dtype).transpose(-1, -2)
    elif format == "sliced" and shape:
        made = torch.randn(*shape[:-1], shape[-1] + 3, device=DEVICE, dtype=dtype)[..., : shape[-1]]
    elif format == "channels_last":
        layout = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
        made = torch.randn(shape, device=DEVICE, dtype=dtype).to(memory_format=layout)
    else:
        made = torch.randn(shape, device=DEVICE, dtype=dtype)
    return made.requires_grad_(grad) if grad else made


def below(most: int, *shape: int, dtype: torch.dtype = I64) -> Tensor:
    """Random indices."""
    return torch.randint(most, shape, device=DEVICE, dtype=dtype)


def back(result: Any) -> None:
    """The backward pass of all that needs one."""
    found = list(result) if isinstance(result, (list, tuple)) else [result]
    found = [it for it in found if isinstance(it, Tensor) and it.requires_grad]
    if found:
        torch.autograd.backward(found, [torch.ones_like(it) for it in found])


def spread(draws: random.Random, least: int, most: int) -> int:
    """Log-uniform; one in three is a multiple of 64, one in three a power of two."""
    value = int(round(least * (most / least) ** draws.random()))
    kind = draws.randrange(3)
    if kind == 0:
        return value
    if kind == 1:
        return max(least, (value + 63) // 64 * 64)
    return max(least, 1 << max(0, value.bit_length() - 1))


def shape(draws: random.Random, dims: int, numel: int) -> Tuple[int, ...]:
    """Of `dims` dimensions with about `numel` elements."""
    sizes = []
    for left in range(dims, 1, -1):
        size = spread(draws, 1, max(2, int(numel ** (1.6 / left))))
        sizes.append(max(1, min(size, numel)))
        numel = max(1, numel // sizes[-1])
    sizes.append(max(1, numel))
    draws.shuffle(sizes)
    return tuple(sizes)


def short(dtype: Any) -> str:
    """A dtype's name."""
    return str(dtype)[6:]


# Elementwise.

UNARY = """abs neg exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh
atanh sigmoid erf erfc erfinv ceil floor round trunc frac sign sgn reciprocal square digamma lgamma isnan isinf isfinite
logical_not nan_to_num positive relu i0 sinc""".split()
ACTIVATIONS = """relu gelu silu elu selu celu mish hardswish hardsigmoid hardtanh leaky_relu softplus
softsign logsigmoid tanhshrink relu6 glu""".split()
BINARY = """add sub mul div pow maximum minimum atan2 fmod remainder hypot logaddexp eq ne lt le gt ge copysign
fmax fmin floor_divide logical_and logical_or xlogy nextafter""".split()
INTEGER_BINARY = "bitwise_and bitwise_or bitwise_xor bitwise_left_shift gcd lcm".split()


@family(2)
def pointwise(draws: random.Random) -> Cases:
    """Operators element by element: views, broadcasting, mixed dtypes, in place, with out, backward."""
    sizes = [(), (1000,), (3, 5, 7), (1 << 20,), (511, 1025)]
    for name in UNARY:
        operator = getattr(torch, name)
        for dtype in (F32, BF16):
            size = draws.choice(sizes)
            yield (
                f"{name} {short(dtype)} {size}",
                lambda o=operator, s=size, d=dtype: back(o(new(*s, dtype=d, grad=True))),
            )
            yield f"{name} transposed", lambda o=operator, d=dtype: o(new(300, 1000, dtype=d, format="transposed"))
            yield f"{name} sliced", lambda o=operator, d=dtype: o(new(300, 1000, dtype=d, format="sliced"))
        yield f"{name} int", lambda o=operator: o(new(3000, dtype=I64))
        if hasattr(Tensor, name + "_"):
            yield f"{name}_", lambda n=name: getattr(new(2000, 30), n + "_")()
    for name in ACTIVATIONS:
        operator = getattr(F, name)
        for dtype in (F32, BF16):
            yield f"{name} {short(dtype)}", lambda o=operator, d=dtype: back(o(new(640, 2048, dtype=d, grad=True)))
            yield (
                f"{name} {short(dtype)} transposed",
                lambda o=operator, d=dtype: back(o(new(64, 10, 2048, dtype=d, format="transposed").requires_grad_())),
            )
    for name in BINARY:
        operator = getattr(torch, name)
        for left, right in [((512, 300), (512, 300)), ((512, 300), (300,)), ((64, 1, 300), (50, 1)), ((), (1000,))]:
            for first, second in [(F32, F32), (BF16, F32), (F32, I64)]:
                if name in ("nextafter", "copysign", "hypot", "logaddexp", "xlogy") and second is I64:
                    continue
                label = f"{name} {left} {right} {short(first)} {short(second)}"
                grad = second is not I64 and name not in ("nextafter", "gt", "eq", "ne", "lt", "le", "ge")

                def run(
                    o: Any = operator, l: Any = left, r: Any = right, a: Any = first, b: Any = second, g: bool = grad
                ) -> None:
                    back(o(new(*l, dtype=a, grad=g), new(*r, dtype=b, grad=g)))

                yield label, run
    for name in INTEGER_BINARY:
        yield name, lambda o=getattr(torch, name): o(new(512, 300, dtype=I64), new(300, dtype=I32))
    for dtype in (F32, BF16, I64):
        for size in [(1 << 16,), (1000, 1000)]:
            base = f"{short(dtype)} {size}"
            a = lambda d=dtype, s=size: new(*s, dtype=d)
            yield f"add scalar {base}", lambda a=a: a() + 2
            yield f"mul float {base}", lambda a=a: a() * 0.5
            yield f"rsub {base}", lambda a=a: 1 - a()
            yield f"div int {base}", lambda a=a: a() / 3
            yield f"pow {base}", lambda a=a: a() ** 2
            yield f"pow 3 {base}", lambda a=a: back((new(1000, 100, grad=True)) ** 3)
            yield f"add_ scalar {base}", lambda a=a: a().add_(1)
            yield f"add 0-dim cpu {base}", lambda a=a: a() + torch.tensor(2)
            yield f"mul 0-dim {base}", lambda a=a: a() * torch.ones((), device=DEVICE, dtype=torch.int64)
            yield f"clamp {base}", lambda a=a: a().clamp(0, 1)
            yield f"clamp_min {base}", lambda a=a: a().clamp_min(0)
            yield f"eq {base}", lambda a=a: a() == 0
            yield f"bitwise_not {base}", lambda a=a: ~(a() > 0)
            yield f"where {base}", lambda a=a: torch.where(a() > 0, a(), 0)
            yield f"where tensors {base}", lambda a=a: torch.where(a() > 0, a(), a().float())
            yield f"masked_fill {base}", lambda a=a: a().masked_fill(a() > 0, 1)
            yield f"masked_fill_ {base}", lambda a=a: a().masked_fill_(a() > 0, 1)
            yield f"fill_ {base}", lambda a=a: a().fill_(1)
            yield f"zero_ {base}", lambda a=a: a().zero_()
            yield f"copy_ {base}", lambda a=a: a().copy_(a())
            yield f"copy_ dtype {base}", lambda a=a: a().copy_(a().float())
            yield f"out {base}", lambda a=a: torch.add(a(), a(), out=torch.empty_like(a()))
            yield (
                f"out empty {base}",
                lambda a=a, d=dtype: torch.add(a(), a(), out=torch.empty(0, dtype=d, device=DEVICE)),
            )
    for dtype in (F32, BF16):
        n = lambda d=dtype: new(333, 1000, dtype=d, grad=True)
        yield f"lerp {short(dtype)}", lambda n=n: back(torch.lerp(n(), n(), 0.3))
        yield f"lerp tensor {short(dtype)}", lambda n=n: back(torch.lerp(n(), n(), n()))
        yield f"addcmul {short(dtype)}", lambda n=n: back(torch.addcmul(n(), n(), n(), value=0.5))
        yield f"addcdiv {short(dtype)}", lambda n=n: back(torch.addcdiv(n(), n(), n(), value=0.5))
        yield f"lerp_ {short(dtype)}", lambda n=n: n().detach().lerp_(n().detach(), 0.3)
        yield f"addcmul_ {short(dtype)}", lambda n=n: n().detach().addcmul_(n().detach(), n().detach())
        yield f"addcdiv_ {short(dtype)}", lambda n=n: n().detach().addcdiv_(n().detach(), n().detach())
        yield (
            f"prelu {short(dtype)}",
            lambda d=dtype: back(F.prelu(new(32, 64, 30, dtype=d, grad=True), new(64, dtype=d, grad=True))),
        )
        yield f"threshold {short(dtype)}", lambda n=n: back(F.threshold(n(), 0.1, 20))
        yield f"polar {short(dtype)}", lambda: torch.polar(new(100, 64), new(100, 64))
        yield (
            f"rope complex {short(dtype)}",
            lambda d=dtype: back(
                torch.view_as_real(
                    torch.view_as_complex(new(4, 128, 8, 32, 2, grad=True))
                    * torch.polar(new(128, 1, 32), new(128, 1, 32))
                )
            ),
        )
        yield f"rotate half {short(dtype)}", lambda d=dtype: back(_rotate(new(4, 8, 128, 64, dtype=d, grad=True)))
        for other in (F32, BF16, F16, F64, I64, BOOL):
            yield f"to {short(dtype)} {short(other)}", lambda n=n, o=other: n().detach().to(o)
    yield "complex", lambda: torch.complex(new(1000), new(1000))
    yield "autocast weights", lambda: _autocast_linear()


def _rotate(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * new(x.shape[-2], x.shape[-1]) + torch.cat((-x[..., half:], x[..., :half]), -1) * new(*x.shape[-2:])


def _autocast_linear() -> None:
    model = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Linear(1024, 512)).to(DEVICE)
    with torch.autocast(DEVICE, BF16):
        result = model(new(64, 512)).float().square().mean()
    back(result)


# Factories, views, copies.


@family()
def factories(draws: random.Random) -> Cases:
    """Tensors that are made of nothing, views, and random numbers."""
    sizes = [(), (7,), (1 << 18,), (100, 333), (8, 16, 32, 9)]
    for size in sizes:
        for dtype in (F32, BF16, I64, BOOL, U8):
            for name in ("empty", "zeros", "ones"):
                yield (
                    f"{name} {size} {short(dtype)}",
                    lambda n=name, s=size, d=dtype: getattr(torch, n)(s, dtype=d, device=DEVICE),
                )
            yield f"full {size} {short(dtype)}", lambda s=size, d=dtype: torch.full(s, 1, dtype=d, device=DEVICE)
            made = lambda s=size, d=dtype: torch.empty(s, dtype=d, device=DEVICE)
            for name in ("empty_like", "zeros_like", "ones_like", "clone"):
                yield f"{name} {size} {short(dtype)}", lambda n=name, m=made: getattr(torch, n)(m())
            yield f"full_like {size}", lambda m=made: torch.full_like(m(), 1)
            yield f"new_zeros {size}", lambda m=made, s=size: m().new_zeros(s)
            yield f"new_full {size}", lambda m=made, s=size: m().new_full(s, 1)
            yield f"new_empty {size}", lambda m=made, s=size: m().new_empty(s)
        for dtype in (F32, BF16):
            made = lambda s=size, d=dtype: torch.empty(s, dtype=d, device=DEVICE)
            for name in ("normal_", "uniform_", "bernoulli_", "exponential_", "random_", "cauchy_", "log_normal_"):
                yield f"{name} {size} {short(dtype)}", lambda n=name, m=made: getattr(m(), n)()
            for name in ("rand_like", "randn_like", "bernoulli"):
                yield f"{name} {size}", lambda n=name, m=made: getattr(torch, n)(m().zero_())
            yield f"rand {size}", lambda s=size, d=dtype: torch.rand(s, dtype=d, device=DEVICE)
            for p in (0.1, 0.5):
                yield (
                    f"dropout {size} {p}",
                    lambda s=size, d=dtype, p=p: back(F.dropout(new(*s, dtype=d, grad=True), p)),
                )
            yield f"dropout_ {size}", lambda s=size, d=dtype: F.dropout(new(*s, dtype=d), 0.1, inplace=True)
            yield f"normal tensor {size}", lambda s=size: torch.normal(new(*s), 1.0)
            yield f"multigammaln {size}", lambda s=size: torch.poisson(new(*s).abs())
    yield "dropout2d", lambda: back(F.dropout2d(new(8, 32, 20, 20, grad=True), 0.2))
    yield "feature_alpha_dropout", lambda: back(F.alpha_dropout(new(8, 320, grad=True), 0.2, training=True))
    for count in (1, 10, 1000, 4096, 30001, 100_000, 1_000_000, 3_000_001):
        yield f"randperm {count}", lambda n=count: torch.randperm(n, device=DEVICE)
        yield f"randperm int32 {count}", lambda n=count: torch.randperm(n, device=DEVICE, dtype=I32)
        yield f"arange {count}", lambda n=count: torch.arange(n, device=DEVICE)
        yield f"arange float {count}", lambda n=count: torch.arange(0, n, 0.5, device=DEVICE)
        yield f"linspace {count}", lambda n=count: torch.linspace(0, 1, n, device=DEVICE)
        yield f"logspace {count}", lambda n=count: torch.logspace(0, 1, n, device=DEVICE)
        yield f"randint {count}", lambda n=count: torch.randint(5, (n,), device=DEVICE)
    for n in (10, 500, 2000):
        for name in ("tril", "triu"):
            for dtype in (F32, BOOL, BF16):
                yield (
                    f"{name} {n} {short(dtype)}",
                    lambda o=getattr(torch, name), n=n, d=dtype: o(torch.ones(n, n, dtype=d, device=DEVICE)),
                )
            yield f"{name} view {n}", lambda o=getattr(torch, name), n=n: o(new(3, n, n, format="transposed"))
            yield f"{name}_indices {n}", lambda o=getattr(torch, name + "_indices"), n=n: o(n, n, device=DEVICE)
            yield f"{name}_ {n}", lambda n=n, name=name: getattr(new(n, n), name + "_")()
        yield f"eye {n}", lambda n=n: torch.eye(n, device=DEVICE)
        yield f"diag {n}", lambda n=n: back(torch.diag(new(n, grad=True)))
        yield f"diagonal {n}", lambda n=n: back(torch.diagonal(new(n, n, grad=True)).clone())
        yield f"diag_embed {n}", lambda n=n: torch.diag_embed(new(4, n))
        yield f"one_hot {n}", lambda n=n: F.one_hot(below(n, 200), n)
        yield f"meshgrid {n}", lambda n=n: [it.contiguous() for it in torch.meshgrid(new(n), new(20), indexing="ij")]
    for size, dtype in [((64, 300, 20), F32), ((8, 1000, 64), BF16), ((3, 5, 7), I64)]:
        made = lambda s=size, d=dtype: new(*s, dtype=d, grad=d.is_floating_point)
        views: Dict[str, Callable[[Tensor], Any]] = {
            "view": lambda x: x.view(-1),
            "reshape copy": lambda x: x.transpose(0, 1).reshape(-1),
            "contiguous": lambda x: x.transpose(0, 2).contiguous(),
            "permute": lambda x: x.permute(2, 0, 1).clone(memory_format=torch.contiguous_format),
            "preserve": lambda x: x.permute(2, 0, 1).clone(),
            "expand": lambda x: x[:, :1].expand(-1, 9, -1).contiguous(),
            "slice": lambda x: x[:, 2:5] * 1,
            "select": lambda x: x[:, 2] * 1,
            "strided slice": lambda x: x[:, ::2] * 1,
            "unfold": lambda x: x.unfold(1, 4, 1) * 1,
            "squeeze": lambda x: x.unsqueeze(1).squeeze(1) * 1,
            "split": lambda x: [it * 1 for it in x.split(2, 1)],
            "chunk": lambda x: [it * 1 for it in x.chunk(3, 1)],
            "unbind": lambda x: [it * 1 for it in x.unbind(0)],
            "movedim": lambda x: x.movedim(0, 2).flatten(),
            "flip": lambda x: x.flip(1),
            "flip two": lambda x: x.flip(0, 2),
            "roll": lambda x: x.roll(3, 1),
            "roll flat": lambda x: x.roll(3),
            "rot90": lambda x: x.rot90(1, (0, 1)),
            "repeat": lambda x: x.repeat(2, 1, 3),
            "tile": lambda x: x.tile(2),
            "cat": lambda x: torch.cat([x, x, x[:, :1]], 1),
            "cat last": lambda x: torch.cat([x, x[..., :3]], -1),
            "cat views": lambda x: torch.cat([x.transpose(0, 2), x.transpose(0, 2)], 1),
            "cat dtypes": lambda x: torch.cat([x, x.double()], 0),
            "stack": lambda x: torch.stack([x, x], 1),
            "pad": lambda x: F.pad(x, (1, 2, 3, 0)),
            "pad circular": lambda x: F.pad(x, (1, 2), mode="circular"),
            "repeat_interleave": lambda x: x.repeat_interleave(3, 1),
            "as_strided": lambda x: x.as_strided((2, 3), (1, 2)) * 1,
            "index_fill": lambda x: x.index_fill(1, below(3, 2), 0),
            "view dtype": lambda x: x.detach().view(torch.uint8).clone(),
            "tensor_split": lambda x: [it * 1 for it in x.tensor_split(3, 0)],
            "slice_scatter": lambda x: torch.slice_scatter(x, x[:, :1], 1, 2, 3),
            "select_scatter": lambda x: torch.select_scatter(x, x[:, 0], 1, 2),
            "setitem slice": lambda x: x.detach().clone()[:, 2:4].copy_(x.detach()[:, :2]),
            "setitem value": lambda x: x.detach().clone().__setitem__((slice(None), 1), 0),
            "atleast": lambda x: torch.atleast_3d(x) * 1,
            "swap": lambda x: x.swapaxes(0, 1).contiguous(),
            "block_diag": lambda x: torch.block_diag(x[0], x[0]),
            "kron": lambda x: torch.kron(x[0, :8], x[0, :4]),
            "outer": lambda x: torch.outer(x[0, :3].flatten(), x[0, 0]),
            "trace": lambda x: x[0].trace(),
            "vander": lambda x: torch.vander(x.detach()[0, 0]),
            "cross": lambda x: torch.linalg.cross(x[..., :3].contiguous(), x[..., :3].contiguous()),
            "cartesian": lambda x: torch.cartesian_prod(x[0, 0], x[0, 1]),
            "combinations": lambda x: torch.combinations(x.detach()[0, 0]),
        }
        for name, view in views.items():
            yield f"{name} {size} {short(dtype)}", lambda m=made, v=view: back(v(m()))
    for count in (2, 30, 200):
        yield f"cat {count}", lambda n=count: back(torch.cat([new(64, 20, grad=True) for _ in range(n)], 1))
        yield f"stack {count}", lambda n=count: back(torch.stack([new(64, 20, grad=True) for _ in range(n)]))
    yield "cat 5d channels_last", lambda: torch.cat([new(2, 8, 20, 20, format="channels_last")] * 2, 1)


@family()
def copies(draws: random.Random) -> Cases:
    """Between the devices, with other dtypes and layouts, pinned or not."""
    for size in [(1000,), (512, 300), (8, 3, 224, 224)]:
        for dtype in (F32, BF16, I64, U8):
            cpu = lambda s=size, d=dtype: torch.ones(s, dtype=d)
            label = f"{size} {short(dtype)}"
            yield f"to device {label}", lambda c=cpu: c().to(DEVICE)
            yield f"to device, other dtype {label}", lambda c=cpu: c().to(DEVICE, F16)
            yield f"to device, strided {label}", lambda c=cpu: c().expand(2, *c().shape).transpose(0, -1).to(DEVICE)
            yield f"to device, sliced {label}", lambda c=cpu: c()[..., ::2].to(DEVICE)
            yield f"copy_ to device {label}", lambda c=cpu, s=size: torch.empty(s, device=DEVICE).copy_(c())
            yield f"copy_ strided {label}", lambda c=cpu, s=size: torch.empty(*s, 2, device=DEVICE)[..., 0].copy_(c())
            yield f"to cpu {label}", lambda c=cpu: c().to(DEVICE).cpu()
            yield f"to cpu, other dtype {label}", lambda c=cpu: c().to(DEVICE).to("cpu", F64)
            yield f"to cpu, sliced {label}", lambda c=cpu: c().to(DEVICE)[..., ::2].cpu()
            yield f"cpu.copy_ dtype {label}", lambda c=cpu, s=size: torch.empty(s, dtype=F64).copy_(c().to(DEVICE))
            yield f"cpu.copy_ strided {label}", lambda c=cpu: torch.empty(*c().shape, 2)[..., 0].copy_(c().to(DEVICE))
            if torch.cuda.is_available():
                pinned = lambda c=cpu: c().pin_memory()
                yield f"pinned {label}", lambda p=pinned: p().to(DEVICE, non_blocking=True)
                yield f"pinned dtype {label}", lambda p=pinned: p().to(DEVICE, F16, non_blocking=True)
                yield f"pinned sliced {label}", lambda p=pinned: p()[..., ::2].to(DEVICE, non_blocking=True)
                yield f"to pinned {label}", lambda p=pinned, c=cpu: p().copy_(c().to(DEVICE), non_blocking=True)
                yield (
                    f"to pinned dtype {label}",
                    lambda c=cpu, s=size: torch.empty(s, dtype=F64, pin_memory=True).copy_(
                        c().to(DEVICE), non_blocking=True
                    ),
                )
            yield f"tensor {label}", lambda: torch.tensor([1.0, 2.0], device=DEVICE)
            yield f"item {label}", lambda c=cpu: c().to(DEVICE).sum().item()
            yield f"tolist {label}", lambda c=cpu: c().to(DEVICE).flatten()[:3].tolist()
    yield "channels_last", lambda: torch.ones(8, 3, 64, 64).to(DEVICE, memory_format=torch.channels_last)
    yield "channels_last of cpu", lambda: torch.ones(8, 3, 64, 64).to(memory_format=torch.channels_last).to(DEVICE)
    yield "module to", lambda: nn.Linear(300, 400).to(DEVICE, BF16)
    yield "module half", lambda: nn.Linear(300, 400).to(DEVICE).half()
    yield "equal", lambda: torch.equal(new(1000), new(1000))
    yield "allclose", lambda: torch.allclose(new(1000, 200), new(1000, 200))
    yield "isclose", lambda: torch.isclose(new(1000, 200), new(1000, 200))
    yield "setitem cpu", lambda: new(100, 100).__setitem__((slice(None), 3), torch.ones(100))
    yield "resize", lambda: new(100).resize_(5000)
    yield "resize smaller", lambda: new(1000).resize_(10)
    yield "set_", lambda: new(1000).set_(new(10))


# Reductions.


@family(2)
def reductions(draws: random.Random) -> Cases:
    """Over all or some dimensions, from small to 2**27 elements, narrow, wide, strided."""

    def operators(dtype: torch.dtype) -> Dict[str, Callable[..., Any]]:
        integer = not dtype.is_floating_point
        found: Dict[str, Callable[..., Any]] = {
            "sum": lambda x, *d: x.sum(*d),
            "amax": lambda x, *d: x.amax(*d),
            "any": lambda x, *d: x.any(*d),
            "count_nonzero": lambda x, *d: x.count_nonzero(*d),
        }
        if dtype is BOOL:
            found["all"] = lambda x, *d: x.all(*d)
            return found
        found["sum f32"] = lambda x, *d: x.sum(*d, dtype=F32) if d else x.sum(dtype=F32)
        found["argmax"] = lambda x, *d: x.argmax(*d) if not d or isinstance(d[0], int) else x.amin(*d)
        found["prod"] = lambda x, *d: x.prod(*d) if not d or isinstance(d[0], int) else x.sum(*d)
        if not integer:
            found["mean"] = lambda x, *d: x.mean(*d)
            found["mean f32"] = lambda x, *d: x.mean(*d, dtype=F32) if d else x.mean(dtype=F32)
            found["var"] = lambda x, *d: x.var(*d)
            found["std"] = lambda x, *d: x.std(*d)
            found["var_mean"] = lambda x, *d: torch.var_mean(x, *d)
            found["norm"] = lambda x, *d: torch.linalg.vector_norm(x, 2, *d)
            found["norm 1"] = lambda x, *d: torch.linalg.vector_norm(x, 1, *d)
            found["norm inf"] = lambda x, *d: torch.linalg.vector_norm(x, float("inf"), *d)
            if dtype is not F64:
                found["norm f32"] = lambda x, *d: torch.linalg.vector_norm(x, 2, *d, dtype=F32)
            found["logsumexp"] = lambda x, *d: torch.logsumexp(x, *(d or (tuple(range(x.dim())),)))
            found["nansum"] = lambda x, *d: x.nansum(*d)
            found["aminmax"] = lambda x, *d: torch.aminmax(x, **({"dim": d[0]} if d and isinstance(d[0], int) else {}))
        return found

    def dims(size: Sequence[int]) -> List[Any]:
        found: List[Any] = [None, *range(len(size))]
        if len(size) == 3:
            found += [(0, 1), (1, 2), (0, 2)]
        if len(size) == 4:
            found += [(0, 2, 3), (2, 3), (1, 2, 3)]
        return found

    chosen: List[Tuple[Tuple[int, ...], torch.dtype]] = []
    for size in [(8192, 1024), (4096, 50257), (16, 512, 768), (64, 256, 56, 56), (1 << 24,), (1 << 27,)]:
        chosen += [(size, F32), (size, BF16)]
    for dtype in (F32, BF16, F16, I64, I32, BOOL, F64, U8) * 2:
        for count in (1 << 8, 1 << 14, 1 << 18, 1 << 21, 1 << 24):
            chosen.append((shape(draws, draws.randint(1, 4), spread(draws, count, count * 8)), dtype))
    for size, dtype in chosen:
        for name, operator in operators(dtype).items():
            for dim in dims(size):
                # All of them on all shapes would take too long.
                if dim is not None and draws.random() < 0.5:
                    continue
                if len(size) > 1 and draws.random() < 0.15:
                    layout: Optional[str] = draws.choice(["transposed", "sliced"])
                else:
                    layout = "channels_last" if len(size) == 4 and draws.random() < 0.3 else None
                grad = draws.random() < 0.1 and dtype in (F32, BF16) and size != (1 << 27,)

                def run(
                    o: Any = operator, s: Any = size, t: Any = dtype, d: Any = dim, f: Any = layout, g: bool = grad
                ) -> None:
                    x = new(*s, dtype=t, format=f if t.is_floating_point else None)
                    result = o(x.requires_grad_(g), *([] if d is None else [d]))
                    if g:
                        back(result)

                yield f"{name} {size} {short(dtype)} {dim} {layout}", run


@family(2)
def scans(draws: random.Random) -> Cases:
    """Sorting, selection, scans, sets, histograms: operators with temporaries of CUB."""
    sizes = [
        (10,),
        (1000,),
        (4096,),
        (100_003,),
        (1 << 20,),
        (5_000_000,),
        (64, 128),
        (128, 1024),
        (16, 5000),
        (1000, 64),
    ]
    sizes += [(8, 50257), (4096, 8), (8192, 64), (3, 200_000), (16, 32, 300), (2000, 3000)]
    sizes += [shape(draws, draws.randint(1, 3), spread(draws, 100, 1 << 22)) for _ in range(20)]
    for size in sizes:
        for dtype in (F32, BF16, I64):
            x = lambda s=size, d=dtype: new(*s, dtype=d)
            label = f"{size} {short(dtype)}"
            for dim in {-1, 0}:
                yield f"sort {label} {dim}", lambda x=x, d=dim: x().sort(d)
                yield f"sort stable {label} {dim}", lambda x=x, d=dim: x().sort(d, stable=True)
                yield f"argsort {label} {dim}", lambda x=x, d=dim: x().argsort(d, descending=True)
                yield f"cumsum {label} {dim}", lambda x=x, d=dim: x().cumsum(d)
                if dtype.is_floating_point:
                    yield (
                        f"cumsum backward {label}",
                        lambda s=size, d=dtype, i=dim: back(new(*s, dtype=d, grad=True).cumsum(i)),
                    )
                    yield f"cumprod {label} {dim}", lambda x=x, d=dim: x().cumprod(d)
                    yield f"logcumsumexp {label} {dim}", lambda x=x, d=dim: x().logcumsumexp(d)
                yield f"cummax {label} {dim}", lambda x=x, d=dim: x().cummax(d)
                for k in (1, 8, 64):
                    if k <= size[dim]:
                        yield f"topk {k} {label} {dim}", lambda x=x, k=k, d=dim: x().topk(k, d)
                if size[dim] > 4:
                    yield f"kthvalue {label} {dim}", lambda x=x, d=dim: x().kthvalue(3, d)
                    yield f"median {label} {dim}", lambda x=x, d=dim: x().median(d)
                    yield f"max {label} {dim}", lambda x=x, d=dim: x().max(d)
            yield f"mode {label}", lambda x=x: x().mode(-1)
            yield f"median all {label}", lambda x=x: x().median()
            yield f"unique {label}", lambda x=x: x().unique()
            yield f"unique inverse {label}", lambda x=x: x().unique(return_inverse=True, return_counts=True)
            yield f"unique_consecutive {label}", lambda x=x: x().flatten().unique_consecutive(return_counts=True)
            yield f"nonzero {label}", lambda x=x: (x() > 0).nonzero()
            yield f"nonzero where {label}", lambda x=x: torch.where(x() > 50)
            yield f"masked_select {label}", lambda x=x: x()[x() > 0]
            yield f"masked_scatter {label}", lambda x=x: x().masked_scatter(x() > 0, x())
            if dtype is I64:
                yield f"bincount {label}", lambda x=x: x().flatten().bincount(minlength=100)
                yield f"searchsorted {label}", lambda x=x: torch.searchsorted(new(1000, dtype=I64).sort()[0], x())
                yield f"isin {label}", lambda x=x: torch.isin(x(), new(50, dtype=I64))
                yield f"isin many {label}", lambda x=x: torch.isin(x(), new(5000, dtype=I64))
                yield f"repeat_interleave {label}", lambda s=size: torch.repeat_interleave(below(4, max(s)))
                yield f"sort bool {label}", lambda x=x: (x() > 0).sort(-1)
            if dtype is F32:
                yield f"histc {label}", lambda x=x: x().histc(50)
                yield f"bucketize {label}", lambda x=x: torch.bucketize(x(), new(100).sort()[0])
                yield f"quantile {label}", lambda x=x: x().flatten()[: 1 << 20].quantile(0.3)
                yield f"topk backward {label}", lambda s=size: back(new(*s, grad=True).topk(1, -1)[0])
                yield f"sort backward {label}", lambda s=size: back(new(*s, grad=True).sort(-1)[0])
                yield f"max backward {label}", lambda s=size: back(new(*s, grad=True).max(-1)[0])
                if size[-1] < 1 << 20 and len(size) < 3:
                    yield f"multinomial {label}", lambda x=x: torch.multinomial(x().abs(), 1)
                    yield f"multinomial replacement {label}", lambda x=x, s=size: torch.multinomial(x().abs(), 5, True)
                    yield f"multinomial many {label}", lambda x=x, s=size: torch.multinomial(x().abs(), min(3, s[-1]))


# Normalization, softmax, losses.


@family(2)
def norms(draws: random.Random) -> Cases:
    """Normalizations, forward and backward."""
    for number in range(60):
        width = draws.choice([32, 64, 100, 128, 256, 384, 512, 768, 1024, 1280, 2048, 4096, 5120, 8192, 12288])
        rows = spread(draws, 1, max(2, (1 << 25) // width))
        for dtype, weights in [(F32, F32), (BF16, BF16), (BF16, F32), (F16, F16)][: 4 if number < 20 else 2]:
            label = f"({rows}, {width}) {short(dtype)} {short(weights)}"
            x = lambda r=rows, w=width, d=dtype: new(r, w, dtype=d, grad=True)
            w = lambda w=width, d=weights: new(w, dtype=d, grad=True)
            if weights is dtype:
                yield f"layer_norm {label}", lambda x=x, w=w, n=width: back(F.layer_norm(x(), (n,), w(), w()))
                yield f"layer_norm no bias {label}", lambda x=x, w=w, n=width: back(F.layer_norm(x(), (n,), w()))
                yield f"layer_norm plain {label}", lambda x=x, n=width: back(F.layer_norm(x(), (n,)))
                yield (
                    f"layer_norm frozen {label}",
                    lambda x=x, w=w, n=width: back(F.layer_norm(x(), (n,), w().detach(), w().detach())),
                )
                yield f"rms_norm {label}", lambda x=x, w=w, n=width: back(F.rms_norm(x(), (n,), w()))
            else:

                def mixed(x: Any = x, w: Any = w, n: int = width) -> None:
                    with torch.autocast(DEVICE, BF16):
                        back(F.layer_norm(x(), (n,), w(), w()))

                yield f"layer_norm autocast {label}", mixed
            yield f"rms by hand {label}", lambda x=x, w=w: back(_rms(x(), w()))
    for number in range(60):
        channels = draws.choice([16, 32, 64, 96, 128, 192, 256, 320, 512, 640, 1024, 2048])
        side = draws.choice([1, 4, 7, 8, 14, 16, 28, 32, 56, 64, 112])
        batch = max(1, min(spread(draws, 1, 128), (1 << 25) // (channels * side * side)))
        for dtype in (F32, BF16):
            for layout in (None, "channels_last"):
                label = f"({batch}, {channels}, {side}) {short(dtype)} {layout}"
                x = lambda b=batch, c=channels, s=side, d=dtype, f=layout: new(
                    b, c, s, s, dtype=d, format=f
                ).requires_grad_()
                for weights in {F32, dtype}:
                    w = lambda c=channels, d=weights: new(c, dtype=d, grad=True)

                    def batch_norm(
                        x: Any = x, w: Any = w, c: int = channels, d: Any = weights, train: bool = True
                    ) -> None:
                        run, var = new(c, dtype=d), torch.ones(c, dtype=d, device=DEVICE)
                        back(F.batch_norm(x(), run, var, w(), w(), training=train))

                    yield f"batch_norm {label} {short(weights)}", batch_norm
                    yield f"batch_norm eval {label} {short(weights)}", lambda b=batch_norm: b(train=False)
                groups = draws.choice([1, 8, 16, channels])
                w = lambda c=channels, d=dtype: new(c, dtype=d, grad=True)
                yield f"group_norm {groups} {label}", lambda x=x, w=w, g=groups: back(F.group_norm(x(), g, w(), w()))
                yield f"group_norm plain {label}", lambda x=x, g=groups: back(F.group_norm(x(), g))
        if side > 1:
            yield (
                f"instance_norm {batch, channels, side}",
                lambda b=batch, c=channels, s=side: back(
                    F.instance_norm(new(b, c, s, s, grad=True), weight=new(c, grad=True), bias=new(c, grad=True))
                ),
            )
        yield (
            f"batch_norm 1d {batch, channels}",
            lambda b=batch, c=channels: back(nn.BatchNorm1d(c, device=DEVICE)(new(max(2, b * 10), c, grad=True))),
        )
        yield (
            f"normalize {batch, channels}",
            lambda b=batch, c=channels: back(F.normalize(new(b * 20, c, grad=True), dim=-1)),
        )
        yield (
            f"local_response_norm {batch, channels}",
            lambda b=batch, c=channels, s=side: back(F.local_response_norm(new(b, c, s, s, grad=True), 5)),
        )
        yield (
            f"weight_norm {channels}",
            lambda c=channels: back(
                nn.utils.parametrizations.weight_norm(nn.Linear(c, 64, device=DEVICE))(new(8, c, grad=True))
            ),
        )


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    state = x.float()
    state = state * torch.rsqrt(state.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * state.to(x.dtype)


@family(2)
def losses(draws: random.Random) -> Cases:
    """Softmax and losses, forward and backward."""
    for _ in range(40):
        classes = draws.choice([2, 10, 100, 1000, 1025, 4096, 8192, 32000, 32128, 50257, 128256])
        rows = spread(draws, 1, max(2, min(16384, (1 << 28) // classes // 4)))
        for dtype in (F32, BF16, F16):
            label = f"({rows}, {classes}) {short(dtype)}"
            x = lambda r=rows, c=classes, d=dtype: new(r, c, dtype=d, grad=True)
            y = lambda r=rows, c=classes: below(c, r)
            yield f"softmax {label}", lambda x=x: back(x().softmax(-1))
            yield f"log_softmax {label}", lambda x=x: back(x().log_softmax(-1))
            yield f"softmax f32 {label}", lambda x=x: back(x().softmax(-1, dtype=F32))
            yield f"softmax dim 0 {label}", lambda x=x: back(x().softmax(0))
            yield f"cross_entropy {label}", lambda x=x, y=y: back(F.cross_entropy(x(), y()))
            yield f"cross_entropy float {label}", lambda x=x, y=y: back(F.cross_entropy(x().float(), y()))
            yield f"cross_entropy smooth {label}", lambda x=x, y=y: back(F.cross_entropy(x(), y(), label_smoothing=0.1))
            yield f"cross_entropy sum {label}", lambda x=x, y=y: back(F.cross_entropy(x(), y(), reduction="sum"))
            yield f"cross_entropy none {label}", lambda x=x, y=y: back(F.cross_entropy(x(), y(), reduction="none"))
            yield f"cross_entropy soft {label}", lambda x=x, y=y: back(F.cross_entropy(x(), x().detach().softmax(-1)))
            if classes < 5000:
                yield (
                    f"cross_entropy weight {label}",
                    lambda x=x, y=y, c=classes, d=dtype: back(
                        F.cross_entropy(x(), y(), weight=torch.ones(c, device=DEVICE, dtype=d))
                    ),
                )
                for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits"):
                    for reduction in ("mean", "none"):
                        yield (
                            f"{name} {reduction} {label}",
                            lambda x=x, n=name, r=reduction: back(
                                getattr(F, n)(x(), x().detach().sigmoid(), reduction=r)
                            ),
                        )
                yield (
                    f"bce {label}",
                    lambda x=x: back(F.binary_cross_entropy(x().float().sigmoid(), x().detach().float().sigmoid())),
                )
                yield f"kl_div {label}", lambda x=x: back(F.kl_div(x().log_softmax(-1), x().detach().softmax(-1)))
                yield f"cosine {label}", lambda x=x: back(F.cosine_similarity(x(), x()))
                yield f"margin {label}", lambda x=x, y=y: back(F.multi_margin_loss(x().float(), y()))
                yield f"triplet {label}", lambda x=x: back(F.triplet_margin_loss(x(), x(), x()))
                yield f"gumbel {label}", lambda x=x: back(F.gumbel_softmax(x(), hard=True))
                yield f"poisson {label}", lambda x=x: back(F.poisson_nll_loss(x(), x().detach().abs()))
    for batch, classes, side in [(8, 21, 128), (4, 150, 64), (2, 19, 512)]:
        for dtype in (F32, BF16):
            yield (
                f"cross_entropy 2d {batch, classes, side} {short(dtype)}",
                lambda b=batch, c=classes, s=side, d=dtype: back(
                    F.cross_entropy(new(b, c, s, s, dtype=d, grad=True), below(c, b, s, s), ignore_index=3)
                ),
            )
    for batch, heads, length in [(4, 8, 128), (2, 16, 1000), (1, 12, 2048), (8, 12, 513)]:
        for dtype in (F32, BF16):
            yield (
                f"attention softmax {batch, heads, length} {short(dtype)}",
                lambda b=batch, h=heads, n=length, d=dtype: back(
                    F.softmax(new(b, h, n, n, dtype=d, grad=True), dim=-1, dtype=F32).to(d)
                ),
            )
            yield (
                f"masked softmax {batch, heads, length} {short(dtype)}",
                lambda b=batch, h=heads, n=length, d=dtype: back(
                    (
                        new(b, h, n, n, dtype=d, grad=True) + torch.full((n, n), -1e4, device=DEVICE, dtype=d).triu(1)
                    ).softmax(-1)
                ),
            )
    for length, batch, classes, target in [
        (100, 8, 30, 20),
        (400, 16, 5000, 100),
        (1000, 4, 100, 200),
        (300, 32, 1000, 40),
    ]:
        for dtype in (F32,):

            def ctc(
                t: int = length, b: int = batch, c: int = classes, s: int = target, cpu: bool = False, d: Any = dtype
            ) -> None:
                guess = new(t, b, c, dtype=d, grad=True).log_softmax(-1)
                device = "cpu" if cpu else DEVICE
                sizes = [torch.full((b,), it, dtype=I64, device=device) for it in (t, s)]
                back(F.ctc_loss(guess, torch.randint(1, c, (b, s), device=DEVICE), *sizes))

            yield f"ctc {length, batch, classes, target}", ctc
            yield f"ctc cpu lengths {length, batch, classes, target}", lambda c=ctc: c(cpu=True)


# Matrix products.


@family(2)
def products(draws: random.Random) -> Cases:
    """Matrix products, forward and backward; the first calls show what cuBLAS keeps."""

    def dims() -> Tuple[int, int, int]:
        return spread(draws, 1, 8192), spread(draws, 8, 8192), spread(draws, 8, 8192)

    def in_stream(program: Program) -> Program:
        def run() -> None:
            if not torch.cuda.is_available():
                return program()
            with torch.cuda.stream(torch.cuda.Stream()):
                program()

        return run

    for number in range(70):
        rows, inner, columns = dims()
        for dtype in (F32, BF16, F16, F64)[: 4 if number % 5 == 0 else 2]:
            label = f"({rows}, {inner}, {columns}) {short(dtype)}"
            a = lambda r=rows, c=inner, d=dtype, f=None: new(r, c, dtype=d, format=f).requires_grad_()
            b = lambda r=inner, c=columns, d=dtype, f=None: new(r, c, dtype=d, format=f).requires_grad_()
            c = lambda c=columns, d=dtype: new(c, dtype=d, grad=True)
            w = lambda r=columns, c=inner, d=dtype: new(r, c, dtype=d, grad=True)
            yield f"linear {label}", lambda a=a, w=w, c=c: back(F.linear(a(), w(), c()))
            yield f"mm {label}", lambda a=a, b=b: back(a() @ b())
            yield f"linear no bias {label}", lambda a=a, w=w: back(F.linear(a(), w()))
            yield f"mm transposed {label}", lambda a=a, b=b: back(a(f="transposed") @ b(f="transposed"))
            yield f"mm sliced {label}", lambda a=a, b=b: back(a(f="sliced") @ b(f="sliced"))
            yield f"addmm {label}", lambda a=a, b=b, c=c: back(torch.addmm(c(), a(), b()))
            yield (
                f"addmm full {label}",
                lambda a=a, b=b, r=rows, c=columns, d=dtype: back(
                    torch.addmm(new(r, c, dtype=d, grad=True), a(), b(), beta=0.5)
                ),
            )
            yield (
                f"addmm_ {label}",
                lambda a=a, b=b, r=rows, c=columns, d=dtype: new(r, c, dtype=d).addmm_(a().detach(), b().detach()),
            )
            yield f"mv {label}", lambda a=a, n=inner, d=dtype: back(a() @ new(n, dtype=d, grad=True))
            yield (
                f"linear 3d {label}",
                lambda w=w, c=c, r=rows, i=inner, d=dtype: back(
                    F.linear(new(2, max(1, r // 2), i, dtype=d, grad=True), w(), c())
                ),
            )
            yield (
                f"linear 3d view {label}",
                lambda w=w, c=c, r=rows, i=inner, d=dtype: back(
                    F.linear(new(max(1, r // 2), 2, i, dtype=d, grad=True).transpose(0, 1), w(), c())
                ),
            )
            yield f"linear gelu {label}", lambda a=a, w=w, c=c: back(F.gelu(F.linear(a(), w(), c())))
            if number % 4 == 0:
                yield (
                    f"stream {label}",
                    in_stream(lambda a=a, w=w, c=c, b=b: (back(a() @ b()), F.linear(a(), w(), c()))),
                )
                yield f"dot {label}", lambda n=inner, d=dtype: torch.dot(new(n, dtype=d), new(n, dtype=d))
                yield (
                    f"einsum {label}",
                    lambda n=inner, d=dtype: back(
                        torch.einsum(
                            "bhid,bhjd->bhij",
                            new(2, 4, 70, 64, dtype=d, grad=True),
                            new(2, 4, 50, 64, dtype=d, grad=True),
                        )
                    ),
                )
    for number in range(50):
        batch = spread(draws, 1, 256)
        rows, inner, columns = (spread(draws, 1, max(2, int(4096 / batch**0.5))) for _ in range(3))
        for dtype in (F32, BF16):
            label = f"({batch}, {rows}, {inner}, {columns}) {short(dtype)}"
            for layouts in [(None, None), ("transposed", None), (None, "transposed"), ("sliced", "sliced")]:

                def bmm(
                    n: int = batch, r: int = rows, i: int = inner, c: int = columns, d: Any = dtype, f: Any = layouts
                ) -> None:
                    back(
                        torch.bmm(
                            new(n, r, i, dtype=d, format=f[0]).requires_grad_(),
                            new(n, i, c, dtype=d, format=f[1]).requires_grad_(),
                        )
                    )

                yield f"bmm {layouts} {label}", bmm
            yield (
                f"baddbmm {label}",
                lambda n=batch, r=rows, i=inner, c=columns, d=dtype: back(
                    torch.baddbmm(
                        new(n, r, c, dtype=d, grad=True),
                        new(n, r, i, dtype=d, grad=True),
                        new(n, i, c, dtype=d, grad=True),
                    )
                ),
            )
            yield (
                f"matmul 4d {label}",
                lambda n=batch, r=rows, i=inner, c=columns, d=dtype: back(
                    torch.matmul(
                        new(n, r, 2, i, dtype=d, grad=True).transpose(1, 2),
                        new(n, c, 2, i, dtype=d, grad=True).permute(0, 2, 3, 1),
                    )
                ),
            )
            yield (
                f"matmul broadcast {label}",
                lambda n=batch, r=rows, i=inner, c=columns, d=dtype: back(
                    torch.matmul(new(n, r, i, dtype=d, grad=True), new(i, c, dtype=d, grad=True))
                ),
            )
    for tokens, experts, inner, columns in [
        (512, 4, 256, 512),
        (4096, 8, 1024, 2048),
        (1000, 16, 512, 1024),
        (8192, 8, 2048, 1024),
    ]:

        def grouped(t: int = tokens, e: int = experts, i: int = inner, c: int = columns) -> None:
            ends = torch.arange(1, e + 1, device=DEVICE, dtype=I32) * (t // e)
            product = getattr(F, "grouped_mm", None) or torch._grouped_mm
            back(product(new(t, i, dtype=BF16, grad=True), new(e, i, c, dtype=BF16, grad=True), offs=ends))

        yield f"grouped_mm {tokens, experts, inner, columns}", grouped
    for rows, inner, columns in [(128, 256, 512), (4096, 1024, 2048)]:

        def scaled(r: int = rows, i: int = inner, c: int = columns) -> Tensor:
            one = torch.ones((), device=DEVICE)
            kind = torch.float8_e4m3fn
            a, b = new(r, i).to(kind), new(c, i).to(kind).t()
            return torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=BF16)

        yield f"_scaled_mm {rows, inner, columns}", scaled
        yield (
            f"_int_mm {rows, inner, columns}",
            lambda r=rows, i=inner, c=columns: torch._int_mm(new(r, i, dtype=I8), new(i, c, dtype=I8)),
        )
    yield (
        "bilinear",
        lambda: back(nn.Bilinear(64, 64, 32, device=DEVICE)(new(100, 64, grad=True), new(100, 64, grad=True))),
    )
    yield "cdist", lambda: back(torch.cdist(new(4, 300, 64, grad=True), new(4, 200, 64, grad=True)))
    yield "cdist large", lambda: back(torch.cdist(new(1000, 64, grad=True), new(2000, 64, grad=True)))
    yield "addr", lambda: torch.addr(new(300, 200), new(300), new(200))
    yield "addmv", lambda: back(torch.addmv(new(300, grad=True), new(300, 200, grad=True), new(200, grad=True)))
    yield (
        "addbmm",
        lambda: back(torch.addbmm(new(30, 40, grad=True), new(8, 30, 20, grad=True), new(8, 20, 40, grad=True))),
    )
    yield "multi_head_attention", lambda: _multi_head(True)
    yield "multi_head_attention eval", lambda: _multi_head(False)


def _multi_head(train: bool) -> None:
    layer = nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True, device=DEVICE).train(train)
    with contextlib.nullcontext() if train else torch.no_grad():
        back(layer(new(8, 100, 256, grad=train)))


@family(2)
def attention(draws: random.Random) -> Cases:
    """Scaled dot product attention as PyTorch chooses it, and each backend by force."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = {
        "default": None,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "math": SDPBackend.MATH,
    }
    chosen: List[Tuple[int, int, int, int, int, int]] = [
        *(
            (8, 12, 12, 1024, 1024, 64),
            (2, 16, 16, 2048, 2048, 128),
            (4, 16, 4, 512, 512, 64),
            (16, 12, 12, 197, 197, 64),
        ),
        *((1, 8, 8, 4096, 4096, 40), (2, 8, 8, 1, 777, 128), (32, 8, 8, 100, 100, 32), (4, 4, 4, 1024, 1024, 96)),
    ]
    for _ in range(28):
        batch, heads = spread(draws, 1, 32), draws.choice([1, 2, 4, 6, 8, 12, 16, 32])
        long = spread(draws, 8, 4096)
        other = long if draws.random() < 0.6 else spread(draws, 8, 4096)
        long = 1 if draws.random() < 0.1 else long
        while batch > 1 and batch * heads * long * other > 1 << 28:
            batch //= 2
        groups = heads if draws.random() < 0.7 or heads < 4 else heads // 4
        width = draws.choice([16, 32, 40, 48, 64, 72, 80, 96, 128, 160, 192, 256])
        chosen.append((batch, heads, groups, long, other, width))
    for number, (batch, heads, groups, long, other, width) in enumerate(chosen):
        for dtype in (BF16, F32, F16):
            for name, backend in backends.items():
                if dtype is F16 and name != "default":
                    continue
                for variant in ("plain", "causal", "bool mask", "float mask", "dropout", "inference"):
                    if variant not in ("plain", "causal") and number >= 8 and draws.random() < 0.5:
                        continue
                    if variant == "causal" and long == 1:
                        continue

                    def run(
                        s: Any = (batch, heads, groups, long, other, width),
                        d: Any = dtype,
                        k: Any = backend,
                        v: str = variant,
                    ) -> None:
                        n, h, g, q, o, w = s
                        grad = v != "inference"
                        # The usual layout: heads are split from a product's columns.
                        query = new(n, q, h, w, dtype=d, grad=grad).transpose(1, 2)
                        key, value = (new(n, o, g, w, dtype=d, grad=grad).transpose(1, 2) for _ in range(2))
                        mask: Optional[Tensor] = None
                        if v == "bool mask":
                            mask = torch.ones(n, 1, q, o, device=DEVICE, dtype=BOOL).tril()
                        elif v == "float mask":
                            mask = torch.zeros(n, 1, q, o, device=DEVICE, dtype=d)
                        options = {"dropout_p": 0.1 if v == "dropout" else 0.0, "is_causal": v == "causal"}
                        with contextlib.nullcontext() if k is None else sdpa_kernel(k):
                            back(F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=h != g, **options))

                    yield f"{name} {variant} {batch, heads, groups, long, other, width} {short(dtype)}", run
    for batch, heads, length, width in [(4, 8, 256, 64), (2, 4, 1000, 128)]:
        for dtype in (BF16, F32):
            yield (
                f"packed {batch, heads, length, width} {short(dtype)}",
                lambda b=batch, h=heads, n=length, w=width, d=dtype: back(
                    F.scaled_dot_product_attention(
                        *new(b, n, 3, h, w, dtype=d, grad=True).permute(2, 0, 3, 1, 4), is_causal=True
                    )
                ),
            )
            yield (
                f"mask broadcast {batch, heads, length, width} {short(dtype)}",
                lambda b=batch, h=heads, n=length, w=width, d=dtype: back(
                    F.scaled_dot_product_attention(
                        *(new(b, h, n, w, dtype=d, grad=True) for _ in range(3)),
                        torch.ones(n, n, device=DEVICE, dtype=BOOL).tril(),
                    )
                ),
            )
            yield (
                f"mask grad {batch, heads, length, width} {short(dtype)}",
                lambda b=batch, h=heads, n=length, w=width, d=dtype: back(
                    F.scaled_dot_product_attention(
                        *(new(b, h, n, w, dtype=d, grad=True) for _ in range(3)), new(1, h, n, n, dtype=d, grad=True)
                    )
                ),
            )
            yield (
                f"odd mask {batch, heads, length, width} {short(dtype)}",
                lambda b=batch, h=heads, n=length, w=width, d=dtype: back(
                    F.scaled_dot_product_attention(
                        *(new(b, h, n - 3, w, dtype=d, grad=True) for _ in range(3)), new(b, 1, n - 3, n - 3, dtype=d)
                    )
                ),
            )


# Convolutions.

NETWORKS: List[Tuple[int, int, int, int, int, int, int]] = [
    # Of well-known networks: channels, channels out, side, kernel, stride, padding, groups.
    *((3, 64, 224, 7, 2, 3, 1), (64, 64, 56, 1, 1, 0, 1), (64, 64, 56, 3, 1, 1, 1), (64, 256, 56, 1, 1, 0, 1)),
    *((256, 128, 56, 1, 1, 0, 1), (128, 128, 56, 3, 2, 1, 1), (256, 512, 56, 1, 2, 0, 1), (512, 256, 28, 1, 1, 0, 1)),
    *((128, 128, 28, 3, 1, 1, 1), (256, 256, 14, 3, 1, 1, 1), (512, 512, 7, 3, 1, 1, 1), (1024, 2048, 14, 1, 2, 0, 1)),
    *((512, 2048, 7, 1, 1, 0, 1), (2048, 512, 7, 1, 1, 0, 1), (1024, 256, 14, 1, 1, 0, 1), (128, 512, 28, 1, 1, 0, 1)),
    *((3, 96, 64, 3, 1, 1, 1), (96, 96, 64, 3, 1, 1, 1), (192, 192, 32, 3, 1, 1, 1), (384, 192, 32, 3, 1, 1, 1)),
    *((4, 128, 64, 3, 1, 1, 1), (128, 256, 32, 3, 1, 1, 1), (256, 512, 16, 3, 1, 1, 1), (320, 320, 64, 3, 1, 1, 1)),
    *((3, 768, 224, 16, 16, 0, 1), (3, 96, 224, 4, 4, 0, 1), (96, 96, 56, 7, 1, 3, 96), (384, 384, 14, 7, 1, 3, 384)),
    *(
        (32, 32, 112, 3, 1, 1, 32),
        (144, 144, 56, 5, 2, 2, 144),
        (128, 128, 28, 3, 1, 1, 32),
        (512, 1024, 31, 4, 1, 1, 1),
    ),
    *((3, 64, 224, 3, 1, 1, 1), (64, 64, 224, 3, 1, 1, 1), (512, 512, 28, 3, 1, 1, 1), (64, 21, 64, 1, 1, 0, 1)),
]


@family(4)
def convolutions(draws: random.Random) -> Cases:
    """cuDNN, forward and backward."""
    dtypes = (F32, BF16, F16)

    def two(
        batch: int, layer: Any, dtype: Any, layout: Any, bias: bool, grad: bool = True, dilation: int = 1
    ) -> Program:
        channels, out, side, kernel, stride, padding, groups = layer

        def run() -> None:
            x = new(batch, channels, side, side, dtype=dtype, format=layout).requires_grad_(grad)
            w = new(out, channels // groups, kernel, kernel, dtype=dtype, format=layout).requires_grad_(grad)
            b = new(out, dtype=dtype, grad=grad) if bias else None
            y = F.conv2d(x, w, b, stride, padding, dilation, groups)
            if grad:
                torch.autograd.backward(y, torch.randn_like(y))

        return run

    for dtype in dtypes * 2:
        for layout in (None, "channels_last"):
            for layer in NETWORKS:
                batch = max(
                    1,
                    min(
                        draws.choice([1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128]),
                        (1 << 26) // (layer[1] * layer[2] ** 2),
                    ),
                )
                yield (
                    f"2d {batch} {layer} {short(dtype)} {layout}",
                    two(batch, layer, dtype, layout, draws.random() < 0.5),
                )
    for _ in range(360):
        kernel = draws.choice([1, 1, 3, 3, 3, 5, 7])
        channels, out = spread(draws, 3, 1024), spread(draws, 8, 1024)
        if draws.random() < 0.1:
            out = groups = channels
        else:
            groups = 1
        side = draws.choice([5, 7, 8, 13, 14, 16, 20, 28, 32, 48, 56, 64, 96, 128, 160])
        layer = (channels, out, side, kernel, draws.choice([1, 1, 2]), kernel // 2, groups)
        batch = max(1, min(spread(draws, 1, 128), (1 << 25) // (max(channels, out) * side * side)))
        dtype, layout = draws.choice(dtypes), draws.choice([None, "channels_last"])
        grad, dilation = draws.random() < 0.8, draws.choice([1, 1, 1, 2])
        label = f"2d {batch} {layer} {short(dtype)} {layout} grad {grad} dilation {dilation}"
        yield label, two(batch, layer, dtype, layout, draws.random() < 0.5, grad, dilation)
        if draws.random() < 0.2:
            yield (
                f"transposed {label}",
                lambda b=batch, y=layer, d=dtype, f=layout: back(
                    F.conv_transpose2d(
                        new(b, y[0], y[2], y[2], dtype=d, format=f).requires_grad_(),
                        new(y[0], max(1, min(256, y[1])), 4, 4, dtype=d).requires_grad_(),
                        new(max(1, min(256, y[1])), dtype=d, grad=True),
                        2,
                        1,
                    )
                ),
            )
        if draws.random() < 0.25:
            length = draws.choice([100, 400, 1500, 3000])
            small = max(1, min(batch, 16))
            yield (
                f"1d {small, length} {label}",
                lambda b=small, n=length, y=layer, d=dtype: back(
                    F.conv1d(
                        new(b, y[0], n, dtype=d, grad=True),
                        new(y[1], y[0] // y[6], y[3], dtype=d, grad=True),
                        new(y[1], dtype=d, grad=True),
                        y[4],
                        y[3] // 2,
                        1,
                        y[6],
                    )
                ),
            )
        if draws.random() < 0.15:
            depth = draws.choice([4, 8, 16])
            yield (
                f"3d {depth} {label}",
                lambda t=depth, y=layer, d=dtype, f=layout: back(
                    F.conv3d(
                        new(2, min(64, y[0]), t, min(32, y[2]), min(32, y[2]), dtype=d, grad=True),
                        new(min(64, y[1]), min(64, y[0]), min(3, y[3]), min(3, y[3]), min(3, y[3]), dtype=d, grad=True),
                        None,
                        1,
                        min(3, y[3]) // 2,
                    )
                ),
            )


@family()
def convolutions_benchmark(draws: random.Random) -> Cases:
    """With `torch.backends.cudnn.benchmark`: the first call tries what cuDNN has, the second uses the fastest."""
    for dtype, layout in [(F32, None), (BF16, "channels_last"), (F16, "channels_last")]:
        for layer in NETWORKS:
            channels, out, side, kernel, stride, padding, groups = layer
            batch = max(1, min(draws.choice([8, 16, 32, 64]), (1 << 25) // (out * side * side)))

            def run(b: int = batch, y: Any = layer, d: Any = dtype, f: Any = layout) -> None:
                channels, out, side, kernel, stride, padding, groups = y
                torch.backends.cudnn.benchmark = True
                try:
                    for _ in range(2):
                        x = new(b, channels, side, side, dtype=d, format=f).requires_grad_()
                        w = new(out, channels // groups, kernel, kernel, dtype=d, format=f).requires_grad_()
                        back(F.conv2d(x, w, None, stride, padding, 1, groups))
                finally:
                    torch.backends.cudnn.benchmark = False

            yield f"benchmark {batch} {layer} {short(dtype)} {layout}", run


# Indices.


@family(2)
def indexing(draws: random.Random) -> Cases:
    """Gather, scatter, embeddings and their backward passes."""
    for number in range(50):
        rows, width = spread(draws, 2, 200_000), draws.choice([1, 8, 32, 64, 100, 128, 256, 768])
        count = spread(draws, 1, 300_000)
        while count * width > 1 << 25:
            count //= 2
        for dtype in (F32, BF16):
            label = f"({rows}, {width}) {count} {short(dtype)}"
            x = lambda r=rows, w=width, d=dtype: new(r, w, dtype=d, grad=True)
            i = lambda r=rows, c=count: below(r, c)
            s = lambda c=count, w=width, d=dtype: new(c, w, dtype=d, grad=True)
            yield f"embedding {label}", lambda x=x, i=i: back(F.embedding(i(), x()))
            yield f"embedding padding {label}", lambda x=x, i=i: back(F.embedding(i(), x(), padding_idx=0))
            yield (
                f"embedding 2d {label}",
                lambda x=x, r=rows, c=count: back(F.embedding(below(r, 4, max(1, c // 4)), x())),
            )
            yield f"embedding int32 {label}", lambda x=x, i=i: back(F.embedding(i().int(), x()))
            yield (
                f"embedding by frequency {label}",
                lambda x=x, i=i: back(F.embedding(i(), x(), scale_grad_by_freq=True)),
            )
            yield f"index {label}", lambda x=x, i=i: back(x()[i()])
            yield f"index two {label}", lambda x=x, i=i, c=count, w=width: back(x()[i(), below(w, c)])
            yield f"index slice {label}", lambda x=x, c=count, w=width: back(x()[:, below(w, 5)])
            yield f"index_select {label}", lambda x=x, i=i: back(x().index_select(0, i()))
            yield f"index_add {label}", lambda x=x, i=i, s=s: back(x().index_add(0, i(), s()))
            yield f"index_add_ {label}", lambda x=x, i=i, s=s: x().detach().index_add_(0, i(), s().detach())
            yield f"index_copy_ {label}", lambda x=x, i=i, s=s: x().detach().index_copy_(0, i(), s().detach())
            yield f"index_put_ {label}", lambda x=x, i=i, s=s: x().detach().index_put_((i(),), s().detach())
            yield (
                f"index_put_ accumulate {label}",
                lambda x=x, i=i, s=s: x().detach().index_put_((i(),), s().detach(), True),
            )
            yield f"index_put_ value {label}", lambda x=x, i=i: x().detach().__setitem__(i(), 0.0)
            yield f"setitem mask {label}", lambda x=x: x().detach().__setitem__(new(*x().shape) > 0, 0.0)
            wide = lambda i=i, c=count, w=width: i()[:, None].expand(c, w)
            yield f"gather {label}", lambda x=x, wide=wide: back(x().gather(0, wide()))
            yield f"scatter_add {label}", lambda x=x, wide=wide, s=s: back(x().scatter_add(0, wide(), s()))
            yield f"scatter {label}", lambda x=x, wide=wide, s=s: back(x().scatter(0, wide(), s()))
            yield f"scatter value {label}", lambda x=x, wide=wide: x().detach().scatter_(0, wide(), 1.0)
            for how in ("sum", "mean", "amax"):
                yield (
                    f"scatter_reduce {how} {label}",
                    lambda x=x, wide=wide, s=s, h=how: back(x().scatter_reduce(0, wide(), s(), h, include_self=False)),
                )
                yield (
                    f"index_reduce {how} {label}",
                    lambda x=x, i=i, s=s, h=how: (
                        x().detach().index_reduce_(0, i(), s().detach(), {"sum": "prod"}.get(h, h))
                    ),
                )
            yield f"take {label}", lambda x=x, r=rows, w=width: x().detach().take(below(r * w, 100))
            yield (
                f"take_along_dim {label}",
                lambda x=x, w=width, r=rows: back(torch.take_along_dim(x(), below(w, r, 1), 1)),
            )
            yield f"put_ {label}", lambda x=x, c=count, d=dtype: x().detach().put_(below(2, c), new(c, dtype=d), True)
            yield (
                f"segment_reduce {label}",
                lambda s=s, c=count: back(torch.segment_reduce(s(), "sum", lengths=torch.full((1,), c, device=DEVICE))),
            )
            if count < rows * 4:
                bags = max(1, count // 8)
                for mode in ("sum", "mean", "max"):

                    def bag(
                        x: Any = x, i: Any = i, n: int = bags, c: int = count, m: str = mode, weights: bool = False
                    ) -> None:
                        offsets = (torch.arange(n, device=DEVICE) * (c // n)).long()
                        samples = new(c, dtype=x().dtype) if weights else None
                        back(F.embedding_bag(i(), x(), offsets, mode=m, per_sample_weights=samples))

                    yield f"embedding_bag {mode} {label}", bag
                    yield (
                        f"embedding_bag 2d {mode} {label}",
                        lambda x=x, r=rows, c=count, m=mode: back(
                            F.embedding_bag(below(r, max(1, c // 8), 8), x(), mode=m)
                        ),
                    )
                yield f"embedding_bag weights {label}", lambda b=bag: b(m="sum", weights=True)
                yield f"embedding sparse {label}", lambda x=x, i=i: back(F.embedding(i(), x(), sparse=True))
                yield (
                    f"embedding_bag sparse {label}",
                    lambda x=x, r=rows, c=count: back(
                        F.embedding_bag(below(r, max(1, c // 8), 8), x(), mode="sum", sparse=True)
                    ),
                )
    for batch, length, words in [(8, 1024, 50257), (16, 512, 30522), (4, 2048, 128256), (32, 100, 1000)]:
        for dtype in (F32, BF16):
            yield (
                f"tokens {batch, length, words} {short(dtype)}",
                lambda b=batch, n=length, w=words, d=dtype: back(
                    F.embedding(below(w, b, n), new(w, 256, dtype=d, grad=True))
                ),
            )
            yield (
                f"pick {batch, length, words} {short(dtype)}",
                lambda b=batch, n=length, d=dtype: back(
                    new(b, n, 64, dtype=d, grad=True)[torch.arange(b, device=DEVICE), below(n, b)]
                ),
            )
            yield (
                f"relative bias {batch, length}",
                lambda b=batch, n=length, d=dtype: back(
                    F.embedding(below(32, min(n, 512), min(n, 512)), new(32, 8, dtype=d, grad=True)).permute(2, 0, 1)
                ),
            )
    for heads, length, width in [(8, 512, 64), (32, 4096, 128)]:
        yield (
            f"cache index_copy_ {length}",
            lambda h=heads, n=length, w=width: new(2, h, n, w, dtype=BF16).index_copy_(
                2, below(n, 3), new(2, h, 3, w, dtype=BF16)
            ),
        )
        yield (
            f"cache setitem {length}",
            lambda h=heads, n=length, w=width: new(2, h, n, w, dtype=BF16).__setitem__(
                (slice(None), slice(None), below(n, 3)), new(2, h, 3, w, dtype=BF16)
            ),
        )


# Recurrent networks, pooling, resampling.


@family()
def recurrent(draws: random.Random) -> Cases:
    """cuDNN's recurrent networks: workspace, reserve, weights in one buffer."""
    for number in range(30):
        kind = draws.choice([nn.LSTM, nn.GRU, nn.RNN])
        inner, hidden = draws.choice([32, 80, 128, 256, 512]), draws.choice([32, 64, 128, 256, 512, 768])
        layers, both = draws.randint(1, 4), draws.random() < 0.4
        batch, length = spread(draws, 1, 64), spread(draws, 2, 400)
        dropout = draws.choice([0.0, 0.2]) if layers > 1 else 0.0
        for dtype in (F32, F16, BF16)[: 3 if number % 3 == 0 else 1]:
            for grad in (True, False):

                def run(
                    k: Any = kind,
                    i: int = inner,
                    h: int = hidden,
                    y: int = layers,
                    t: bool = both,
                    p: float = dropout,
                    s: Any = (length, batch),
                    d: Any = dtype,
                    g: bool = grad,
                    first: bool = bool(number % 2),
                    packed: bool = False,
                ) -> None:
                    model = k(i, h, y, bidirectional=t, dropout=p, batch_first=first).to(DEVICE, d).train(g)
                    x = new(*(reversed(s) if first else s), i, dtype=d, grad=g)
                    with torch.set_grad_enabled(g):
                        if packed:
                            sizes = sorted((max(1, s[0] - 3 * n) for n in range(s[1])), reverse=True)
                            sizes[0] = s[0]
                            x = nn.utils.rnn.pack_padded_sequence(x, torch.tensor(sizes), batch_first=first)
                            result = model(x)[0]
                            back(nn.utils.rnn.pad_packed_sequence(result, batch_first=first)[0])
                        else:
                            back(model(x)[0])

                label = (
                    f"{kind.__name__} {inner, hidden, layers, both, batch, length, dropout} {short(dtype)} grad {grad}"
                )
                yield label, run
                yield f"packed {label}", lambda r=run: r(packed=True)
        yield (
            f"cell {inner, hidden}",
            lambda i=inner, h=hidden, b=batch: back(nn.LSTMCell(i, h, device=DEVICE)(new(b, i, grad=True))[0]),
        )
        yield (
            f"gru cell {inner, hidden}",
            lambda i=inner, h=hidden, b=batch: back(nn.GRUCell(i, h, device=DEVICE)(new(b, i, grad=True))),
        )


@family()
def resampling(draws: random.Random) -> Cases:
    """Pooling, interpolation, sampling, padding, folding; operators of torchvision where it is installed."""
    for number in range(24):
        batch, channels, side = (
            spread(draws, 1, 32),
            draws.choice([3, 16, 64, 100, 256]),
            draws.choice([7, 14, 28, 33, 64, 112]),
        )
        while batch * channels * side * side > 1 << 24:
            batch = max(1, batch // 2)
            side = side // 2 + 1
        for dtype in (F32, BF16):
            for layout in (None, "channels_last"):
                label = f"({batch}, {channels}, {side}) {short(dtype)} {layout}"
                x = lambda b=batch, c=channels, s=side, d=dtype, f=layout: new(
                    b, c, s, s, dtype=d, format=f
                ).requires_grad_()
                found: Dict[str, Callable[[Tensor], Any]] = {
                    "max_pool2d": lambda x: F.max_pool2d(x, 2),
                    "max_pool2d 3": lambda x: F.max_pool2d(x, 3, 2, 1),
                    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
                    "adaptive_avg 1": lambda x: F.adaptive_avg_pool2d(x, 1),
                    "adaptive_avg": lambda x: F.adaptive_avg_pool2d(x, 5),
                    "adaptive_max": lambda x: F.adaptive_max_pool2d(x, 3),
                    "nearest": lambda x: F.interpolate(x, scale_factor=2),
                    "nearest size": lambda x: F.interpolate(x, size=(31, 17)),
                    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
                    "bilinear corners": lambda x: F.interpolate(x, size=(40, 50), mode="bilinear", align_corners=True),
                    "bicubic": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
                    "antialias": lambda x: F.interpolate(x, size=(16, 16), mode="bilinear", antialias=True),
                    "area": lambda x: F.interpolate(x, size=(16, 16), mode="area"),
                    "pixel_shuffle": lambda x: F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2),
                    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x[..., :6, :6], 2),
                    "reflect": lambda x: F.pad(x, (1, 1, 2, 2), mode="reflect"),
                    "replicate": lambda x: F.pad(x, (1, 1, 2, 2), mode="replicate"),
                    "constant": lambda x: F.pad(x, (1, 1, 2, 2)),
                    "unfold": lambda x: F.unfold(x, 3, padding=1),
                    "fold": lambda x: F.fold(
                        F.unfold(x, 2, stride=2), (x.shape[2] // 2 * 2, x.shape[3] // 2 * 2), 2, stride=2
                    ),
                    "grid_sample": lambda x: F.grid_sample(
                        x, new(x.shape[0], 20, 30, 2, dtype=x.dtype, grad=True), align_corners=False
                    ),
                    "lp_pool2d": lambda x: F.lp_pool2d(x, 2, 2),
                    "channel_shuffle": lambda x: F.channel_shuffle(x.repeat(1, 2, 1, 1), 2),
                    "max_unpool": lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
                }
                for name, operator in found.items():
                    if name in ("max_unpool",) and side % 2:
                        continue
                    yield f"{name} {label}", lambda x=x, o=operator: back(o(x()))
        length = side * 10
        one = lambda b=batch, c=channels, n=length: new(b, c, n, grad=True)
        for name, operator in {
            "max_pool1d": lambda x: F.max_pool1d(x, 2),
            "avg_pool1d": lambda x: F.avg_pool1d(x, 2),
            "adaptive_avg_pool1d": lambda x: F.adaptive_avg_pool1d(x, 4),
            "linear": lambda x: F.interpolate(x, scale_factor=2, mode="linear"),
            "nearest1d": lambda x: F.interpolate(x, scale_factor=2),
            "reflect1d": lambda x: F.pad(x, (3, 3), mode="reflect"),
        }.items():
            yield f"{name} {batch, channels, length}", lambda x=one, o=operator: back(o(x()))
        three = lambda b=batch, c=channels: new(min(b, 4), min(c, 64), 8, 14, 14, grad=True)
        for name, operator in {
            "max_pool3d": lambda x: F.max_pool3d(x, 2),
            "avg_pool3d": lambda x: F.avg_pool3d(x, 2),
            "adaptive_avg_pool3d": lambda x: F.adaptive_avg_pool3d(x, 1),
            "trilinear": lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"),
            "nearest3d": lambda x: F.interpolate(x, scale_factor=2),
        }.items():
            yield f"{name} {batch, channels}", lambda x=three, o=operator: back(o(x()))
        yield (
            f"affine_grid {batch, side}",
            lambda b=batch, s=side: back(F.affine_grid(new(b, 2, 3, grad=True), [b, 3, s, s], align_corners=False)),
        )
    try:
        from torchvision import ops
    except (ImportError, RuntimeError):
        return

    def boxes(count: int) -> Tensor:
        corner = torch.rand(count, 2, device=DEVICE) * 100
        return torch.cat([corner, corner + 10 + torch.rand(count, 2, device=DEVICE) * 50], 1)

    for count in (1, 60, 500, 2000, 9000):
        yield f"nms {count}", lambda n=count: ops.nms(boxes(n), torch.rand(n, device=DEVICE), 0.5)
        yield (
            f"batched_nms {count}",
            lambda n=count: ops.batched_nms(boxes(n), torch.rand(n, device=DEVICE), below(5, n), 0.5),
        )
        yield f"box_iou {count}", lambda n=count: ops.box_iou(boxes(n), boxes(100))
        if count < 1000:
            yield (
                f"roi_align {count}",
                lambda n=count: back(ops.roi_align(new(2, 64, 50, 50, grad=True), [boxes(n), boxes(n)], 7, 0.25, 2)),
            )
            yield (
                f"roi_pool {count}",
                lambda n=count: back(ops.roi_pool(new(2, 64, 50, 50, grad=True), [boxes(n)] * 2, 7, 0.25)),
            )
    yield (
        "deform_conv2d",
        lambda: back(
            ops.deform_conv2d(
                new(2, 16, 20, 20, grad=True), new(2, 18, 20, 20, grad=True), new(16, 16, 3, 3, grad=True), padding=1
            )
        ),
    )
    yield "sigmoid_focal_loss", lambda: back(ops.sigmoid_focal_loss(new(300, 20, grad=True), new(300, 20).sigmoid()))
    yield "stochastic_depth", lambda: back(ops.stochastic_depth(new(8, 64, 10, 10, grad=True), 0.3, "row"))


# Optimizers.


@family(2)
def optimizers(draws: random.Random) -> Cases:
    """Each optimizer of torch.optim, by element, foreach and fused; clipping; scaled gradients; averages."""
    models: List[List[Tuple[int, ...]]] = [
        [(1000, 256), (256,), (256, 1024), (1024,), (), (3, 3, 64, 64)],
        [(50257, 256), *[(768, 768), (768,), (3072, 768), (3072,)] * 6],
        [(64,)] * 80,
        [(4096, 4096), (11008, 1024), (4096,)],
        [(3, 5), (7,)],
        *(
            [shape(draws, draws.randint(1, 2), spread(draws, 1, 1 << 20)) for _ in range(spread(draws, 1, 120))]
            for _ in range(4)
        ),
    ]

    def parameters(shapes: Any, dtype: Any) -> List[Tensor]:
        made = [new(*it, dtype=dtype, grad=True) for it in shapes]
        for it in made:
            it.grad = torch.ones_like(it)
        return made

    kinds: Dict[str, Tuple[Any, Dict[str, Any]]] = {
        "AdamW": (torch.optim.AdamW, {}),
        "Adam": (torch.optim.Adam, {}),
        "Adam decay amsgrad": (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
        "Adam capturable": (torch.optim.Adam, {"capturable": True}),
        "SGD": (torch.optim.SGD, {"lr": 0.1}),
        "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}),
        "SGD nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        "Adagrad": (torch.optim.Adagrad, {}),
        "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
        "Adadelta": (torch.optim.Adadelta, {}),
        "Adamax": (torch.optim.Adamax, {}),
        "NAdam": (torch.optim.NAdam, {}),
        "RAdam": (torch.optim.RAdam, {}),
        "ASGD": (torch.optim.ASGD, {}),
        "Rprop": (torch.optim.Rprop, {}),
        "Adafactor": (torch.optim.Adafactor, {}),
    }
    fused = ("AdamW", "Adam", "Adam decay amsgrad", "SGD", "SGD momentum", "SGD nesterov", "Adagrad")
    for number, shapes in enumerate(models):
        for name, (kind, options) in kinds.items():
            for how in ({"foreach": True}, {"foreach": False}, {"fused": True}):
                if "fused" in how and name not in fused:
                    continue
                if how == {"foreach": False} and number not in (0, 4):
                    continue
                for dtype in (F32, BF16)[: 2 if number < 2 else 1]:

                    def run(k: Any = kind, o: Any = options, h: Any = how, s: Any = shapes, d: Any = dtype) -> None:
                        optimizer = k(parameters(s, d), **o, **h)
                        for _ in range(2):
                            optimizer.step()

                    yield f"{name} {how} model {number} {short(dtype)}", run
        for dtype in (F32, BF16):
            p = lambda s=shapes, d=dtype: parameters(s, d)
            for kind in (2.0, float("inf"), 1.0):
                yield f"clip {kind} {number} {short(dtype)}", lambda p=p, k=kind: nn.utils.clip_grad_norm_(p(), 1.0, k)
            yield f"clip slow {number} {short(dtype)}", lambda p=p: nn.utils.clip_grad_norm_(p(), 1.0, foreach=False)
            yield f"clip value {number} {short(dtype)}", lambda p=p: nn.utils.clip_grad_value_(p(), 1.0)
            yield f"zero_grad {number}", lambda p=p: torch.optim.SGD(p(), 0.1).zero_grad(set_to_none=False)
            f = lambda p=p: [it.detach() for it in p()]
            foreach: Dict[str, Callable[[List[Tensor]], Any]] = {
                "lerp_": lambda x: torch._foreach_lerp_(x, x, 0.1),
                "mul": lambda x: torch._foreach_mul(x, 0.1),
                "mul_": lambda x: torch._foreach_mul_(x, 0.1),
                "mul list": lambda x: torch._foreach_mul(x, x),
                "mul tensor": lambda x: torch._foreach_mul_(x, torch.ones((), device=DEVICE)),
                "add": lambda x: torch._foreach_add(x, x),
                "add_": lambda x: torch._foreach_add_(x, x, alpha=0.5),
                "sub": lambda x: torch._foreach_sub(x, x),
                "div_": lambda x: torch._foreach_div_(x, x),
                "sqrt": lambda x: torch._foreach_sqrt(x),
                "abs": lambda x: torch._foreach_abs(x),
                "neg": lambda x: torch._foreach_neg(x),
                "exp": lambda x: torch._foreach_exp(x),
                "norm": lambda x: torch._foreach_norm(x, 2),
                "norm 1": lambda x: torch._foreach_norm(x, 1),
                "norm inf": lambda x: torch._foreach_norm(x, float("inf")),
                "max": lambda x: torch._foreach_max(x),
                "pow": lambda x: torch._foreach_pow(x, 2),
                "addcmul_": lambda x: torch._foreach_addcmul_(x, x, x, 0.5),
                "addcdiv_": lambda x: torch._foreach_addcdiv_(x, x, x, 0.5),
                "addcmul": lambda x: torch._foreach_addcmul(x, x, x, 0.5),
                "maximum_": lambda x: torch._foreach_maximum_(x, x),
                "zero_": lambda x: torch._foreach_zero_(x),
                "copy_": lambda x: torch._foreach_copy_(x, x),
                "copy_ other": lambda x: torch._foreach_copy_([it.float() for it in x], x),
                "sign": lambda x: torch._foreach_sign(x),
                "clamp": lambda x: torch._foreach_clamp_min(x, 0.1),
                "reciprocal_": lambda x: torch._foreach_reciprocal_(x),
                "unscale": lambda x: torch._amp_foreach_non_finite_check_and_unscale_(
                    x, torch.zeros(1, device=DEVICE), torch.ones(1, device=DEVICE)
                ),
            }
            for name, operator in foreach.items():
                yield f"foreach {name} {number} {short(dtype)}", lambda f=f, o=operator: o(f())
            yield f"to vector {number} {short(dtype)}", lambda f=f: nn.utils.parameters_to_vector(f())
            yield f"total norm {number} {short(dtype)}", lambda f=f: nn.utils.get_total_norm(f())
    yield (
        "update scale",
        lambda: torch._amp_update_scale_(
            torch.ones(1, device=DEVICE),
            torch.zeros(1, device=DEVICE, dtype=I32),
            torch.zeros(1, device=DEVICE),
            2.0,
            0.5,
            100,
        ),
    )

    def scaler() -> None:
        model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 8)).to(DEVICE)
        optimizer, scale = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler(DEVICE)
        for _ in range(2):
            with torch.autocast(DEVICE, F16):
                loss = model(new(32, 256)).square().mean()
            scale.scale(loss).backward()
            scale.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scale.step(optimizer)
            scale.update()
            optimizer.zero_grad()

    yield "GradScaler", scaler


# Linear algebra, Fourier transforms, sparse tensors.


@family()
def algebra(draws: random.Random) -> Cases:
    """cuSOLVER, cuFFT, cuSPARSE."""
    for count, n in [(1, 8), (1, 300), (1, 1000), (20, 32), (3, 500)]:

        def positive(b: int = count, n: int = n) -> Tensor:
            x = new(b, n, n)
            return (x @ x.mT + n * torch.eye(n, device=DEVICE)).requires_grad_()

        found: Dict[str, Callable[[Tensor], Any]] = {
            "cholesky": torch.linalg.cholesky,
            "inv": torch.linalg.inv,
            "det": torch.linalg.det,
            "slogdet": lambda x: torch.linalg.slogdet(x)[1],
            "solve": lambda x: torch.linalg.solve(x, x[..., :3].contiguous()),
            "qr": lambda x: torch.linalg.qr(x)[1],
            "eigh": lambda x: torch.linalg.eigh(x)[0],
            "svd": lambda x: torch.linalg.svdvals(x),
            "lu": lambda x: torch.linalg.lu_factor(x)[0],
            "triangular": lambda x: torch.linalg.solve_triangular(x, x[..., :3].contiguous(), upper=True),
            "matrix_exp": lambda x: torch.linalg.matrix_exp(x * 1e-3),
            "pinv": lambda x: torch.linalg.pinv(x),
            "lstsq": lambda x: torch.linalg.lstsq(x.detach(), x.detach()[..., :2].contiguous())[0],
            "norm nuc": lambda x: torch.linalg.matrix_norm(x),
        }
        for name, operator in found.items():
            if name in ("svd", "pinv", "eigh") and n > 500:
                continue
            yield f"{name} {count, n}", lambda p=positive, o=operator: back(o(p()))
    for size in [(1000,), (64, 1024), (8, 3, 128, 128), (4, 100_003)]:
        x = lambda s=size: new(*s, grad=True)
        yield f"fft {size}", lambda x=x: back(torch.view_as_real(torch.fft.fft(x())))
        yield f"rfft {size}", lambda x=x: back(torch.view_as_real(torch.fft.rfft(x())))
        yield f"irfft {size}", lambda x=x: back(torch.fft.irfft(torch.fft.rfft(x())))
        if len(size) > 1:
            yield f"fft2 {size}", lambda x=x: back(torch.view_as_real(torch.fft.fft2(x())))
        if len(size) == 2:
            yield (
                f"stft {size}",
                lambda x=x: back(
                    torch.view_as_real(
                        torch.stft(x(), 400, 160, window=torch.ones(400, device=DEVICE), return_complex=True)
                    )
                ),
            )
    for rows, columns, count in [(100, 200, 1000), (5000, 3000, 100_000)]:

        def sparse(r: int = rows, c: int = columns, n: int = count) -> Tensor:
            where = torch.stack([below(r, n), below(c, n)])
            return torch.sparse_coo_tensor(where, new(n), (r, c), device=DEVICE)

        yield f"coalesce {rows, columns, count}", lambda s=sparse: s().coalesce()
        yield f"sparse mm {rows, columns, count}", lambda s=sparse, c=columns: torch.sparse.mm(s(), new(c, 64))
        yield f"csr mm {rows, columns, count}", lambda s=sparse, c=columns: s().coalesce().to_sparse_csr() @ new(c, 64)
        yield f"to_dense {rows, columns, count}", lambda s=sparse: s().to_dense()


# All operators that PyTorch tests itself, with its own small inputs.


@family(4)
def tested(draws: random.Random) -> Cases:
    """PyTorch's own list of operators with inputs for tests: small, but all of them."""
    try:
        import sys
        import types
        import unittest

        if "expecttest" not in sys.modules:
            # The list imports it, and does not use it.
            stub: Any = types.ModuleType("expecttest")
            stub.TestCase, stub.ACCEPT = unittest.TestCase, False
            sys.modules.setdefault("expecttest", stub)
        from torch.testing._internal.common_methods_invocations import op_db
    except ImportError as error:
        raise RuntimeError(f"PyTorch's list of operators cannot be imported: {error}") from error
    # Which crash or wait for minutes, or of which each sample takes long.
    skipped = (
        "linalg.",
        "svd",
        "pca_lowrank",
        "symeig",
        "to_sparse",
        "sparse.",
        "ormqr",
        "geqrf",
        "lobpcg",
        "jiterator",
    )
    for operator in op_db:
        if operator.name.startswith(skipped):
            continue
        for dtype in (F32, BF16, I64):
            if dtype not in operator.dtypesIfCUDA:
                continue

            def run(o: Any = operator, d: Any = dtype) -> None:
                grad = d.is_floating_point and o.supports_autograd
                for count, sample in enumerate(o.sample_inputs(DEVICE, d, requires_grad=grad)):
                    if count == 6:
                        break
                    result = o.op(sample.input, *sample.args, **sample.kwargs)
                    if grad and isinstance(result, (Tensor, tuple, list)):
                        back(sample.output_process_fn_grad(result))

            yield f"{operator.name} {operator.variant_test_name} {short(dtype)}", run
