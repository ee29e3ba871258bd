"""Trainings on synthetic data, as one process runs them: `lengths`, a transformer on sequences of varying length,
`streams`, a student and a teacher on several streams, and `short_lived`, the first beside streams that come and go.
Started by child.py, compared by compare.py.

All random numbers come from fixed seeds on the CPU and all kernels are deterministic, so two processes compute the same
bits, whatever allocator they use. The host waits for the whole GPU only once per group of steps, whose time is taken.
"""

import ctypes
import os
import random
import statistics
import sys
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

import child
import torch
from child import check, data
from torch import Tensor, nn

import model as models

# The host waits for the GPU after this many steps; the time of a step is that of a group divided by its size.
GROUP = 10
# Of the images: pixels of a patch, and classes. Of the encoders: the width, such that the GPU has more to do than the
# host.
PATCH, CLASSES, WIDTH = 16, 1000, 1536
# How often the thread reads how much of the device is in use, in seconds.
SAMPLE_PERIOD = 0.01


def lengths(allocator: str) -> None:
    """A transformer on batches whose sequences have another length in every step."""
    _run(allocator, Lengths, steps=320)


def streams(allocator: str) -> None:
    """A student on the main stream, its teacher on a second one, and input from a third, with `record_stream`."""
    _run(allocator, Streams, steps=200)


def short_lived(allocator: str) -> None:
    """`lengths`, while streams are created, used and destroyed: 1,280 in all."""
    _run(allocator, ShortLived, steps=320)


class Lengths:
    """A language model of 8 layers, batches of 32 sequences with 64 to 512 tokens."""

    BATCH = 32

    def __init__(self, steps: int) -> None:
        self.model = models.Transformer(layers=8, width=1024, heads=16).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        draws, numbers = random.Random(5), torch.Generator().manual_seed(7)
        self.batches: List[Tensor] = []
        for _ in range(steps):
            shape = (self.BATCH, draws.randint(64, models.LENGTH_MAX) + 1)
            self.batches.append(torch.randint(models.VOCABULARY, shape, generator=numbers).pin_memory())

    def step(self, number: int) -> Tensor:
        """One step; the loss."""
        tokens = self.batches[number].cuda(non_blocking=True)
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = self.model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class ShortLived(Lengths):
    """Beside each step, four streams that PyTorch does not own: memory of each is used, freed, and the stream
    destroyed, as a library does that has streams of its own."""

    STREAMS = 4

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.sizes = random.Random(11)

    def step(self, number: int) -> Tensor:
        """One step; the loss."""
        for _ in range(self.STREAMS):
            handle = ctypes.c_void_p()
            # 1: not ordered with the default stream.
            self._call("cuStreamCreate", ctypes.byref(handle), 1)
            stream = torch.cuda.ExternalStream(handle.value or 0)
            with torch.cuda.stream(stream):
                value = number % 251
                blocks = [torch.full((self.sizes.randrange(1, 24) << 20,), value, dtype=torch.uint8, device="cuda")]
                blocks.append(blocks[0] + 1)
                wrong = (blocks[1] != value + 1).sum()
            stream.synchronize()
            assert wrong.item() == 0, f"{wrong.item()} bytes of a short-lived stream are wrong"
            del blocks, wrong
            self._call("cuStreamDestroy_v2", handle)
        return super().step(number)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self.driver, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: {code}")


class Encoder(nn.Module):
    """Patches of images in, one vector per patch out."""

    def __init__(self, layers: int = 6, width: int = WIDTH, heads: int = 24) -> None:
        super().__init__()
        self.embed, self.positions = nn.Linear(3 * PATCH * PATCH, width), nn.Embedding(models.LENGTH_MAX * 2, width)
        self.layers = nn.ModuleList(models.Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, patches: Tensor) -> Tensor:
        x = self.embed(patches) + self.positions(torch.arange(patches.shape[1], device=patches.device))
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Streams:
    """Images of 128 to 384 pixels, 40 per batch.

    The prefetch stream copies and prepares the next batch while this one is computed. The teacher, a moving average of
    the student, runs on its own stream beside the student. What crosses streams is recorded with `record_stream`.
    """

    BATCH = 40
    PIXELS = (128, 384)
    # The host is at most this many steps ahead of the GPU, as in programs that print their loss a step later.
    AHEAD = 2

    def __init__(self, steps: int) -> None:
        self.student, self.head = Encoder().cuda(), nn.Linear(WIDTH, CLASSES).cuda()
        self.teacher = Encoder().cuda().requires_grad_(False)
        self.teacher.load_state_dict(self.student.state_dict())
        self.parameters = [*self.student.parameters(), *self.head.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=3e-4)
        self.main, self.prefetch, self.beside = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
        self.done: List[torch.cuda.Event] = []
        draws, numbers = random.Random(5), torch.Generator().manual_seed(7)
        lowest, highest = (pixels // PATCH for pixels in self.PIXELS)
        self.sides = [draws.randint(lowest, highest) * PATCH for _ in range(steps)]
        # Every batch is another part of this: drawing new numbers would take longer than the step.
        largest = self.BATCH * 3 * self.PIXELS[1] ** 2
        self.host = torch.randint(256, (2 * largest,), generator=numbers, dtype=torch.uint8).pin_memory()
        self.starts = [draws.randrange(largest) for _ in range(steps)]
        self.labels = torch.randint(CLASSES, (steps, self.BATCH), generator=numbers).pin_memory()
        self.flips = torch.randint(2, (steps, self.BATCH, 1, 1, 1), generator=numbers, dtype=torch.bool).pin_memory()
        # All parameters are set before another stream reads them.
        self.prefetch.wait_stream(self.main)
        self.beside.wait_stream(self.main)
        self.next: Optional[Tuple[Tensor, Tensor]] = self._load(0)

    def _load(self, number: int) -> Optional[Tuple[Tensor, Tensor]]:
        """Copies a batch to the device and prepares it, on the prefetch stream."""
        if number >= len(self.sides):
            return None
        side, start = self.sides[number], self.starts[number]
        with torch.cuda.stream(self.prefetch):
            raw = self.host[start : start + self.BATCH * 3 * side * side].cuda(non_blocking=True)
            images = raw.view(self.BATCH, 3, side, side).float().div_(255).sub_(0.45).div_(0.225)
            flip = self.flips[number].cuda(non_blocking=True)
            images = torch.where(flip, images.flip(-1), images)
            count = side // PATCH
            patches = images.view(self.BATCH, 3, count, PATCH, count, PATCH).permute(0, 2, 4, 1, 3, 5)
            patches = patches.reshape(self.BATCH, count * count, 3 * PATCH * PATCH).bfloat16()
            return patches, self.labels[number].cuda(non_blocking=True)

    def step(self, number: int) -> Tensor:
        """One step; the loss."""
        if number >= self.AHEAD:
            self.done[number - self.AHEAD].synchronize()
        assert self.next is not None
        patches, labels = self.next
        for stream in (self.main, self.beside):
            stream.wait_stream(self.prefetch)
            patches.record_stream(stream)
        labels.record_stream(self.main)
        self.next = self._load(number + 1)

        with torch.cuda.stream(self.beside), torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
            expected = self.teacher(patches)
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            found = self.student(patches)
            logits = self.head(found.mean(dim=1))
            # Also after the teacher's moving average of the step before, which read the student's parameters.
            self.main.wait_stream(self.beside)
            expected.record_stream(self.main)
            loss = nn.functional.cross_entropy(logits, labels) + nn.functional.mse_loss(found.float(), expected.float())
        loss.backward()
        self.optimizer.step()

        self.beside.wait_stream(self.main)
        with torch.cuda.stream(self.beside), torch.no_grad():
            torch._foreach_lerp_(list(self.teacher.parameters()), list(self.student.parameters()), 0.01)
        self.done.append(self.main.record_event())
        return loss.detach()


class DeviceMemory:
    """The most that was in use on the device, by the driver's figure, beyond what was in use at the start."""

    def __init__(self) -> None:
        self.samples, self.peak, self._lock = 0, 0, threading.Lock()
        self.before = self._used()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _used(self) -> int:
        free, total = torch.cuda.mem_get_info(0)
        return total - free

    def sample(self) -> None:
        """Reads it now."""
        used = self._used() - self.before
        with self._lock:
            self.peak, self.samples = max(self.peak, used), self.samples + 1

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_PERIOD):
            self.sample()

    def end(self) -> int:
        """Ends the thread; the peak in bytes."""
        self._stop.set()
        self._thread.join()
        self.sample()
        return self.peak


def _run(allocator: str, training: Callable[[int], Any], steps: int) -> None:
    child.enable(allocator)
    steps = int(os.environ.get("WARPOOL_TEST_STEPS") or steps)
    models.reproducible()
    torch.cuda.init()
    # The context's memory is not the allocator's.
    torch.cuda.synchronize()
    memory = DeviceMemory()
    trained = training(steps)
    losses, groups = torch.zeros(steps, device="cuda"), []
    # The peaks so far after each group: steps, active and reserved bytes.
    peaks: List[Tuple[int, int, int]] = []
    torch.cuda.synchronize()
    began = start = time.perf_counter()
    for number in range(steps):
        losses[number].copy_(trained.step(number))
        if (number + 1) % GROUP == 0:
            torch.cuda.synchronize()
            now = time.perf_counter()
            groups.append((now - start) / GROUP)
            memory.sample()
            stats = torch.cuda.memory_stats()
            peaks.append((number + 1, stats["active_bytes.all.peak"], stats["reserved_bytes.all.peak"]))
            # Reading the memory is no part of a step.
            start = time.perf_counter()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    device_peak = memory.end()
    stats = torch.cuda.memory_stats()
    bits = [f"{number & 0xFFFFFFFF:08x}" for number in losses.cpu().view(torch.int32).tolist()]
    check("losses are finite", bool(losses.isfinite().all()), f"{losses[0].item():.4f} to {losses[-1].item():.4f}")
    half = groups[len(groups) // 2 :]
    data(
        steps=steps,
        losses=bits,
        allocated=torch.cuda.max_memory_allocated(),
        active=stats["active_bytes.all.peak"],
        reserved=torch.cuda.max_memory_reserved(),
        peaks=peaks,
        device=device_peak,
        device_samples=memory.samples,
        step_ms=[1e3 * group for group in groups],
        step_ms_median=1e3 * statistics.median(half),
        step_ms_mean=1e3 * statistics.fmean(half),
        seconds=seconds,
        retries=stats["num_alloc_retries"],
        pages=_page_stats(),
    )


def _page_stats() -> Optional[Dict[str, int]]:
    """The statistics of pages, if the backend has any."""
    enabled = sys.modules.get("warpool.torch")
    return enabled.page_stats() if enabled and "backend:paged" in enabled.settings() else None
