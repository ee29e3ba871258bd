"""Tests of `warpool.predict` with a real PyTorch, on a machine without a GPU. WARPOOL_ANSWERS_LIBRARY is the path of
the shared object.

Most programs are a few lines, and what they ask of the allocator is written down by hand. `predict_digests.json` has
the digest of what larger ones ask; after a change that is meant, `WARPOOL_WRITE_DIGESTS=1` writes it again.
"""

import gc
import hashlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Tuple
from unittest import mock

import torch
from torch import nn

import warpool
import warpool.predict
from warpool.predict import PredictionError, _assume, _recording, operators

HERE = Path(__file__).resolve().parent
DIGESTS = HERE / "predict_digests.json"
MIB = 1 << 20


class Steps(NamedTuple):
    """As `warpool.predict.operators` has it."""

    order: List[Tuple[Any, ...]]
    kept: List[Tuple[str, int]] = []


class Table:
    """A table of a test: only what it is given."""

    measured_on = "a test"

    def __init__(self, rules: Dict[str, Steps]) -> None:
        self.rules = rules

    def steps(self, func: Any, args: Any, kwargs: Any, outputs: Any) -> Any:
        return self.rules.get(str(func))


def asked(program: Callable[[], Any], table: Any = None, **options: Any) -> List[str]:
    """What a program asks of the allocator, as words: `a0 4M` is the first allocation, `f0` its free."""
    return words(recorded(program, table, **options))


def recorded(program: Callable[[], Any], table: Any = None, **options: Any) -> Any:
    """The run of a program, without a report."""
    with mock.patch.object(_recording, "_table", lambda card: table), mock.patch.object(_recording.Run, "finish"):
        with warpool.predict.recording(**options) as run:
            result = program()
            # What is left is freed after the log was read.
            run.events = list(run.log.events)
            del result
    return run


def words(run: Any) -> List[str]:
    names = ["a", "f", "u", "done", "sync", "empty", "limit"]
    found = []
    for at in range(0, len(run.events), 5):
        head, number, size = run.events[at : at + 3]
        kind, stream = head & 0xFF, head >> 16
        text = names[kind] + (str(number) if kind <= 2 else "")
        if kind == 0:
            text += f" {size // 1024}K" + (f" s{stream}" if stream else "")
        found.append(text)
    return found


def floats(kib: int) -> torch.Tensor:
    """A tensor of so many KiB on the device."""
    return torch.empty(kib * 256, device="cuda")


class Lifetimes(unittest.TestCase):
    def test_memory_is_freed_when_its_storage_dies(self) -> None:
        def program() -> Any:
            first = floats(4)
            view = first[:10].view(2, 5)
            del first
            second = floats(8)
            del view
            return second

        self.assertEqual(asked(program), ["a0 4K", "a1 8K", "f0"])

    def test_in_place_and_views_ask_for_nothing(self) -> None:
        def program() -> Any:
            x = floats(4)
            x.add_(1).mul_(2).zero_()
            x[3:].t().unsqueeze(0).expand(2, -1)
            return x

        self.assertEqual(asked(program), ["a0 4K"])

    def test_backward_pass_frees_what_the_forward_pass_saved(self) -> None:
        def program() -> Any:
            x = torch.ones(256, 256, device="cuda", requires_grad=True)
            y = (x.exp()).sin()
            loss = y.sum()
            del y
            before = torch.cuda.memory_allocated()
            loss.backward()
            return before, torch.cuda.memory_allocated(), x, loss

        with mock.patch.object(_recording.Run, "finish"), warpool.predict.recording():
            before, after, x, loss = program()
            # x and exp(x), which sin saved; then x and its gradient.
            self.assertEqual((before, after), (2 * 256 * 1024 + 512, 2 * 256 * 1024 + 512))
            self.assertEqual((x.grad.shape, x.grad.device.type), (x.shape, "cuda"))

    def test_gradients_are_taken_over_not_copied(self) -> None:
        def program() -> Any:
            weight = nn.Parameter(torch.empty(64, 64, device="cuda"))
            (weight * 2).sum().backward()
            return weight

        # The parameter, the product, the sum, a one, and one gradient.
        sizes = [word.split()[1] for word in asked(program) if word.startswith("a")]
        self.assertEqual(sizes.count("16K"), 3)

    def test_cycle_is_freed_by_the_collector(self) -> None:
        def program() -> None:
            holder: Dict[str, Any] = {"x": floats(4)}
            holder["self"] = holder
            del holder
            gc.collect()

        self.assertEqual(asked(program), ["a0 4K", "f0"])

    def test_module_moves_parameter_by_parameter(self) -> None:
        def program() -> Any:
            model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
            model[1].weight = model[0].weight
            parameter = model[0].weight
            model.cuda()
            assert model[0].weight is parameter is model[1].weight and parameter.is_cuda
            return model

        # The shared weight once.
        self.assertEqual(asked(program), ["a0 4K", "a1 0K", "a2 0K"])

    def test_training_of_70_billion_parameters_takes_little_memory_of_the_host(self) -> None:
        script = """
import resource, torch, warpool.predict
with warpool.predict.recording(gpu="b200") as run:
    model = torch.nn.Sequential(*(torch.nn.Linear(16384, 16384, bias=False) for _ in range(261)))
    optimizer = torch.optim.AdamW(model.to("cuda", torch.bfloat16).parameters())
    model(torch.empty(4096, 16384, device="cuda", dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
# Weights, gradients and two moments.
assert run.report.peak_allocated_bytes >= 261 * 4 * (512 << 20), run.report
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
"""
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertLess(int(done.stdout), 4000)


class Operators(unittest.TestCase):
    def test_temporaries_lie_between_the_outputs(self) -> None:
        table = Table(
            {
                "aten.empty.memory_format": Steps([("output", 0)]),
                "aten.relu.default": Steps([("alloc", "a", 2048), ("output", 0), ("free", "a"), ("alloc", "b", 1024)]),
            }
        )
        found = asked(lambda: floats(4).relu(), table)
        self.assertEqual(found, ["a0 4K", "a1 2K", "a2 4K", "f1", "a3 1K", "f0", "f3"])

    def test_larger_memory_of_an_output_is_asked_for(self) -> None:
        table = operators.Table.load("h200")

        def program() -> Any:
            x, y = floats(64), floats(64)
            return nn.functional.mse_loss(x, y)

        # The result, which keeps the memory of all losses, and a temporary as large.
        self.assertEqual(asked(program, table), ["a0 64K", "a1 64K", "a2 64K", "a3 64K", "f0", "f1", "f3"])

    def test_training_of_an_lstm_keeps_its_reserve(self) -> None:
        table = operators.Table.load("h200")

        def program() -> Any:
            layers = nn.LSTM(128, 256, 3).cuda()
            return layers(torch.empty(173, 44, 128, device="cuda"))

        # As on an H200: the output, the workspace, the reserve.
        found = asked(program, table)
        at = next(number for number, word in enumerate(found) if word.endswith(f" {75_156_064 // 1024}K"))
        self.assertTrue(found[at + 1].endswith(f" {132_509_952 // 1024}K"), found[at : at + 3])
        self.assertEqual(found[at + 2], "f" + found[at].split()[0][1:])

    def test_library_keeps_its_workspace_for_each_stream(self) -> None:
        table = Table({"aten.mm.default": Steps([("output", 0)], [("cublas", 8 * MIB)])})

        def program() -> Any:
            x = torch.empty(32, 32, device="cuda")
            results = [x @ x, x @ x]
            with torch.cuda.stream(torch.cuda.Stream()):
                results.append(x @ x)
            return results

        found = [word for word in asked(program, table) if "8192K" in word]
        self.assertEqual(found, ["a2 8192K", "a5 8192K s1"])

    def test_operators_with_a_kernel_of_their_own_are_not_taken_apart(self) -> None:
        def program() -> Any:
            x = torch.empty(64, 256, device="cuda", requires_grad=True)
            nn.functional.silu(nn.functional.rms_norm(x, (256,))).sum().backward()

        run = recorded(program, operators.Table.load("h200"))
        names = set(run.recorder.operators)
        self.assertLessEqual({"_fused_rms_norm", "silu_backward"}, names)
        self.assertFalse({"sigmoid", "mul", "rsqrt"} & names, names)
        self.assertEqual(run.recorder.unmodelled, {})

    def test_gradients_that_are_written_in_place_have_one_copy(self) -> None:
        # Under a mode PyTorch makes a second one; on a GPU it does not.
        rows = torch.zeros(32, dtype=torch.int64)
        binary = nn.functional.binary_cross_entropy_with_logits
        for name, program in (
            ("gather", lambda x: x.gather(1, rows.view(32, 1).cuda()).sum()),
            ("index", lambda x: x[rows.cuda()].sum()),
            ("index_select", lambda x: x.index_select(0, rows.cuda()).sum()),
            ("max", lambda x: x.max(-1).values.sum()),
            ("sort", lambda x: x.sort(-1).values[:, :2].sum()),
            ("take", lambda x: x.take(rows.cuda()).sum()),
            ("logits", lambda x: binary(x, torch.empty(32, 1024, device="cuda"))),
        ):
            with self.subTest(name), mock.patch.object(_recording.Run, "finish"), warpool.predict.recording() as run:
                x = torch.empty(32, 1024, device="cuda", requires_grad=True)
                loss = program(x)
                before = len(run.log.events)
                loss.backward()
                run.events = run.log.events[before:]
                made = [word for word in words(run) if word.endswith(" 128K")]
                # The gradient; for sort that of its result before, and for indexing a contiguous copy of it.
                self.assertEqual(len(made), 2 if name in ("sort", "index") else 1, words(run))
                self.assertEqual(x.grad.shape, x.shape)

    def test_operators_without_an_entry_are_named(self) -> None:
        table = Table({"aten.empty.memory_format": Steps([("output", 0)])})
        with mock.patch.object(_recording, "_table", lambda card: table), warpool.predict.recording() as run:
            floats(4).relu().relu()
        report = run.report
        self.assertEqual(
            [(row["operator"], row["count"], row["output_bytes"]) for row in report.unmodelled], [("relu", 2, 8192)]
        )
        self.assertAlmostEqual(report.unmodelled_share, 2 / 3)
        self.assertIn("relu (2)", str(report))

    def test_convolutions_unlike_any_that_was_measured_are_named(self) -> None:
        with warpool.predict.recording() as run:
            images = torch.zeros(3, 5, 900, 30, device="cuda", dtype=torch.float16)
            weights = torch.zeros(301, 5, 41, 3, device="cuda", dtype=torch.float16)
            torch.nn.functional.conv2d(images, weights, stride=13)
        self.assertEqual([(row["operator"], row["count"]) for row in run.report.guessed], [("convolution", 1)])
        self.assertIn("Unlike any convolution that was measured: convolution (1)", str(run.report))


class Streams(unittest.TestCase):
    def test_blocks_belong_to_the_current_stream(self) -> None:
        def program() -> Any:
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                x = floats(4)
            return x, floats(8)

        self.assertEqual(asked(program), ["a0 4K s1", "a1 8K"])

    def test_streams_of_any_device_are_those_of_cuda(self) -> None:
        def program() -> Any:
            stream, event = torch.Stream(device="cuda"), torch.Event(device="cuda", enable_timing=True)
            with stream:
                x = floats(4)
                event.record(stream)
            torch.accelerator.current_stream().wait_event(event)
            event.synchronize()
            self.assertIsInstance(torch.cuda.current_stream(), torch.Stream)
            return x, floats(8)

        self.assertEqual(asked(program), ["a0 4K s1", "a1 8K"])

    def test_recorded_use_delays_the_free(self) -> None:
        def program(wait: bool) -> None:
            with torch.cuda.stream(torch.cuda.Stream()):
                x = floats(4)
            x.record_stream(torch.cuda.current_stream())
            del x
            if wait:
                torch.cuda.synchronize()
            y = floats(4)
            for _ in range(1100):
                y.add_(1)

        self.assertEqual(asked(lambda: program(True))[:3], ["a0 4K s1", "u0", "sync"])
        self.assertEqual(asked(lambda: program(False))[:4], ["a0 4K s1", "u0", "a1 4K", "done"])

    def test_backward_pass_runs_in_the_stream_of_the_forward_pass(self) -> None:
        def program() -> Any:
            x = torch.ones(1024, device="cuda", requires_grad=True)
            with torch.cuda.stream(torch.cuda.Stream()):
                y = x.exp() * 2
            z = y.sum()
            z.backward()
            return x, y, z

        found = [word for word in asked(program) if word.startswith("a")]
        self.assertEqual(
            [word.split()[1:] for word in found if "4K" in word][:3], [["4K"], ["4K", "s1"], ["4K", "s1"]]
        )
        self.assertIn(["4K", "s1"], [word.split()[1:] for word in found[5:]])


class Values(unittest.TestCase):
    def test_values_that_follow_from_inputs_are_known(self) -> None:
        def program() -> Any:
            lengths = torch.tensor([3, 5, 2]).cuda()
            mask = torch.arange(8, device="cuda")[None] < lengths[:, None]
            assert int(lengths.max()) == 5 and bool(mask.any()) and mask.sum().item() == 10
            assert mask.nonzero().shape == (10, 2) and torch.empty(3, 8, device="cuda")[mask].shape == (10,)
            lengths[0] = 7
            return lengths.cpu().tolist()

        with mock.patch.object(_recording.Run, "finish"), warpool.predict.recording() as run:
            self.assertEqual(program(), [7, 5, 2])
        self.assertEqual(run.recorder.assumptions.made, {})

    def test_floats_are_assumed_and_listed(self) -> None:
        with warpool.predict.recording() as run:
            loss = torch.empty(4, device="cuda").sum()
            self.assertEqual([loss.item(), float(loss), f"{loss:.2f}"], [1.0, 1.0, "1.00"])
        self.assertEqual(sum(row["count"] for row in run.report.assumptions), 3)
        self.assertIn("test_predict.py", str(run.report))

    def test_missing_integer_names_the_line_and_what_to_say(self) -> None:
        def program() -> int:
            return int((torch.empty(64, device="cuda") > 0.5).sum())  # THE LINE

        with self.assertRaises(PredictionError) as caught:
            recorded(program)
        text = str(caught.exception)
        self.assertRegex(text, r"test_predict\.py:\d+ \(`return int\(\(torch.*THE LINE`\): an integer is read")
        self.assertRegex(text, r'assume\("test_predict\.py:\d+", VALUE\)')

    def test_elements_of_a_large_tensor_are_read(self) -> None:
        with warpool.predict.recording() as run:
            x = torch.empty(1 << 20, device="cuda")
            array = x.cpu().numpy()
            array[0] = 3
            self.assertEqual((array.shape, array[:2].tolist(), len(x.tolist())), ((1 << 20,), [3.0, 1.0], 1 << 20))
            self.assertTrue(torch.allclose(x, x + 1))
        self.assertIn("allclose() at", str(run.report))

    def test_values_are_printed_where_they_are_known(self) -> None:
        with mock.patch.object(_recording.Run, "finish"), warpool.predict.recording():
            known, unknown = torch.tensor([1, 2]).cuda(), torch.empty(2, 3, device="cuda", requires_grad=True)
            self.assertEqual(repr(known), "tensor([1, 2], device='cuda:0')")
            text = "tensor(..., size=(2, 3), dtype=torch.float32, device='cuda:0'"
            self.assertEqual(repr(unknown), text + ", requires_grad=True)")
            self.assertEqual(str(unknown.exp()), text + ", grad_fn=<ExpBackward0>)")

    def test_given_values_are_used(self) -> None:
        def count() -> int:
            return int((torch.empty(64, device="cuda") > 0.5).sum())

        def rows() -> Any:
            return (torch.empty(64, device="cuda") > 0.5).nonzero()

        with mock.patch.object(_assume, "_rules", []):
            warpool.predict.assume("count", 7)
            warpool.predict.assume("rows", 0.25)
            with warpool.predict.recording() as run:
                self.assertEqual((count(), rows().shape), (7, (16, 1)))
        self.assertTrue(all("as given" in row["text"] for row in run.report.assumptions))

    def test_distributions_accept_parameters_without_values(self) -> None:
        def program() -> Any:
            x = torch.empty(8, 4, device="cuda")
            normal = torch.distributions.Normal(x, x.exp())
            choice = torch.distributions.Categorical(logits=x)
            return normal.log_prob(normal.rsample()).sum() - choice.log_prob(choice.sample()).mean()

        run = recorded(program, operators.Table.load("h200"))
        self.assertNotIn("_is_all_true", run.recorder.unmodelled)
        self.assertIn("what PyTorch checks of all elements holds", run.recorder.assumptions.made)

    def test_pictures_and_masks_that_are_read_are_black(self) -> None:
        def program() -> Any:
            picture = torch.empty(4, 4, device="cuda").mul(255).to(torch.uint8).cpu().numpy()
            return picture, (torch.empty(4, 4, device="cuda") > 0.5).cpu().numpy()

        with warpool.predict.recording() as run:
            picture, mask = program()
        self.assertEqual((picture.shape, picture.any(), mask.dtype, mask.any()), ((4, 4), False, bool, False))
        self.assertRegex(run.report.assumptions[0]["text"], r"elements that are read at .*test_predict.py:\d+ are 0")
        with self.assertRaisesRegex(PredictionError, "the elements of a tensor are read"):
            recorded(lambda: torch.empty(4, 4, device="cuda").long().cpu().numpy())

    def test_routing_is_spread_evenly(self) -> None:
        with warpool.predict.recording() as run:
            chosen = torch.empty(4096, 8, device="cuda").softmax(-1).topk(2).indices
            counts = [int((chosen == expert).sum()) for expert in range(8)]
        self.assertTrue(all(900 < count < 1150 for count in counts), counts)
        self.assertIn("topk", run.report.assumptions[0]["text"])

    def test_gradients_are_finite(self) -> None:
        def program() -> float:
            model = nn.Linear(8, 8).cuda()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cuda")
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(torch.ones(2, 8, device="cuda")).sum()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
            scaler.step(optimizer)
            scaler.update()
            return scaler.get_scale()

        with mock.patch.object(_recording.Run, "finish"), warpool.predict.recording(steps=5) as run:
            self.assertEqual(program(), 65536.0)
            self.assertEqual(run.steps_made, 1)

    def test_floats_without_a_value_are_compared_as_they_are_read(self) -> None:
        with warpool.predict.recording() as run:
            loss, best = torch.empty(4, device="cuda").sum(), float("inf")
            self.assertTrue(loss < best)
            self.assertFalse(loss < 0.5)
            best = loss
            self.assertFalse(torch.empty(4, device="cuda").sum() < best)
        self.assertIn("floats that are compared are 1.0", str(run.report))
        with mock.patch.object(_assume, "_rules", []), warpool.predict.recording():
            warpool.predict.assume("test_floats_without_a_value_are_compared_as_they_are_read", True)
            self.assertTrue(torch.empty(4, device="cuda").sum() < 0.5)

    def test_missing_value_ends_a_program_that_catches_it(self) -> None:
        went_on = []

        def program() -> None:
            for number in range(3):
                try:
                    int((floats(4) > 0.5).sum())
                except Exception:
                    went_on.append(number)

        with self.assertRaisesRegex(PredictionError, "an integer is read"):
            recorded(program)
        self.assertEqual(went_on, [0])


class Surroundings(unittest.TestCase):
    def test_reserved_memory_stays_until_the_cache_is_emptied(self) -> None:
        with mock.patch.object(_recording.Run, "finish"), warpool.predict.recording():
            x = floats(8 << 10)
            del x
            before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
            torch.cuda.empty_cache()
            self.assertEqual((before, torch.cuda.memory_reserved()), ((0, 8 * MIB), 0))

    def test_program_that_allocates_without_end_ends(self) -> None:
        def program() -> None:
            held = []
            while True:
                held.append(torch.empty(1 << 38, dtype=torch.uint8, device="cuda"))

        with self.assertRaisesRegex(PredictionError, r"test_predict.py:\d+: 256 GiB were requested .* --oom raise"):
            recorded(program)

    def test_cuda_graphs_are_named_with_their_line(self) -> None:
        with self.assertRaisesRegex(PredictionError, r"test_predict.py:\d+: CUDA graphs are not predicted"):
            recorded(lambda: torch.cuda.CUDAGraph())

    def test_what_was_saved_is_loaded(self) -> None:
        import io

        def program() -> Any:
            model = nn.BatchNorm1d(1024).cuda()
            optimizer = torch.optim.Adam(model.parameters())
            model(torch.ones(8, 1024, device="cuda")).sum().backward()
            optimizer.step()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "at": 3}
            torch.save(state, "/none/such/best.pt")
            before = torch.cuda.memory_allocated()
            loaded = torch.load("/none/such/best.pt", map_location="cuda", weights_only=True)
            # 2 parameters with 2 moments each, 2 running statistics, and a count; the optimizer's 2 counts move too.
            self.assertEqual(torch.cuda.memory_allocated() - before, 8 * 4096 + 3 * 512)
            model.load_state_dict(loaded["model"])
            optimizer.load_state_dict(loaded["optimizer"])
            self.assertEqual((loaded["at"], int(loaded["model"]["num_batches_tracked"])), (3, 1))
            on_host = torch.load("/none/such/best.pt", map_location="cpu")["model"]
            self.assertEqual({each.device.type for each in on_host.values()}, {"cpu"})
            buffer = io.BytesIO()
            torch.save(model.state_dict(), buffer)
            buffer.seek(0)
            self.assertEqual(torch.load(buffer)["weight"].device.type, "cuda")

        recorded(program)

    def test_generator_of_a_device(self) -> None:
        def program() -> Any:
            generator = torch.Generator(device="cuda").manual_seed(0)
            self.assertEqual(generator.device.type, "cuda")
            return torch.randn(1024, generator=generator, device="cuda")

        self.assertEqual(asked(program), ["a0 4K"])

    def test_compiled_code_runs_eagerly_and_the_report_says_so(self) -> None:
        def program(compiled: bool) -> Any:
            wrap = torch.compile if compiled else lambda function: function
            model = wrap(nn.Sequential(nn.Linear(64, 64), nn.GELU()).cuda())
            loss = wrap(lambda x: x.square().mean())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if compiled:
                model.compile(mode="reduce-overhead")
            loss(model(floats(16).view(-1, 64))).backward()
            optimizer.step()

        self.assertEqual(asked(lambda: program(True)), asked(lambda: program(False)))
        with warpool.predict.recording() as run:
            program(True)
            self.assertEqual(torch.compile(mode="max-autotune", fullgraph=True)(abs)(-1), 1)
        self.assertIn("torch.compile was left out: the program ran eagerly", str(run.report))

    def test_scripted_code_runs_eagerly(self) -> None:
        def gelu(x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.gelu(x) * 2.0

        before = torch.jit.script(gelu)

        def program(scripted: bool) -> Any:
            wrap = torch.jit.script if scripted else lambda function: function
            model = wrap(nn.Linear(64, 64).cuda())
            if scripted:
                self.assertIs(torch.jit.freeze(torch.jit.trace(gelu, (torch.ones(2),))), gelu)
                # PyTorch compiles functions of its own when it is imported.
                __import__("torch.distributed.optim")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                wrap(gelu)(model(floats(16).view(-1, 64))).sum().backward()
                optimizer.step()

        found = recorded(lambda: program(True))
        self.assertEqual(words(found), asked(lambda: program(False)))
        self.assertEqual(found.recorder.remarks, {"TorchScript was left out: the program ran eagerly"})
        # What was compiled before is interpreted; the interpreter would fuse operators in the third call.
        made = asked(lambda: [before(floats(4)) for _ in range(3)])
        self.assertEqual(sum("4K" in each for each in made), 9)
        self.assertTrue(torch.jit.script(gelu) is not gelu and torch._C._jit_texpr_fuser_enabled())

    def test_threads_of_the_program_are_predicted(self) -> None:
        def program() -> Any:
            made: List[Any] = []

            class Loader(threading.Thread):
                def run(self) -> None:
                    made.append(floats(4) + 1)

            loader = Loader()
            loader.start()
            loader.join()
            with ThreadPoolExecutor(4) as pool:
                made += pool.map(lambda kib: floats(kib).exp(), [8] * 100)
            self.assertEqual(torch.cuda.memory_allocated(), 4096 + 100 * 8192)
            return made

        found = words(recorded(program))
        self.assertEqual(found[:3], ["a0 4K", "a1 4K", "f0"])
        numbers = [word.split()[0] for word in found if word.startswith("a")]
        self.assertEqual(numbers, [f"a{number}" for number in range(202)])
        # Not afterwards.
        thread = threading.Thread(target=lambda: self.assertEqual(torch.ones(2).sum().item(), 2.0))
        thread.start()
        thread.join()

    def test_device_that_is_not_there_is_an_error(self) -> None:
        for program in (lambda: floats(4).to("cuda:1"), lambda: torch.empty(4, device="cuda:1")):
            with self.assertRaisesRegex(RuntimeError, "invalid device ordinal .*cuda:1; the prediction has 1: see"):
                recorded(program)
        self.assertEqual(len(asked(lambda: floats(4).to("cuda:1"), gpus=2)), 3)

    def test_step_of_an_optimizer_within_another_counts_once(self) -> None:
        class Twice(torch.optim.Optimizer):
            def __init__(self, params: Any) -> None:
                self.base = torch.optim.SGD(params, lr=0.1)
                super().__init__(self.base.param_groups, {})

            def step(self, closure: Any = None) -> None:
                self.base.step()
                self.base.step()

        model = nn.Linear(4, 4)
        optimizer = Twice(model.parameters())

        def program() -> None:
            for _ in range(3):
                optimizer.step()
            optimizer.base.step()

        self.assertEqual(recorded(program).steps_made, 4)

    def test_kernels_of_triton_take_no_memory(self) -> None:
        try:
            from triton.runtime import autotuner, jit
        except ImportError:
            self.skipTest("triton is not installed: its kernels were NOT tested")
        kernel = jit.JITFunction(floats)
        tuned = autotuner.Autotuner.__new__(autotuner.Autotuner)

        def program() -> Any:
            x, out = floats(4), torch.zeros(1024, device="cuda")
            kernel[(8,)](x, out, 1024, BLOCK=128)
            tuned[lambda meta: (8,)](x, out)
            # What a kernel wrote is not known, but nothing else of it.
            return out.sum().item(), out

        found = recorded(program)
        self.assertEqual(words(found)[:3], ["a0 4K", "a1 4K", "a2 0K"])
        self.assertIn("Triton's kernels were left out: they allocate nothing themselves", found.recorder.remarks)
        self.assertIn("a value that is read", next(iter(found.recorder.assumptions.made)))

    def test_profiler_sees_the_host(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        def program() -> Any:
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], profile_memory=True) as profiler:
                x = floats(4).exp()
            self.assertIn("aten::exp", profiler.key_averages().table(sort_by="cuda_time_total"))
            return x

        found = recorded(program)
        self.assertEqual(words(found), ["a0 4K", "a1 4K", "f0"])
        self.assertEqual(found.recorder.remarks, {"torch.profiler saw the host only"})

    def test_benchmark_of_convolutions_is_remarked(self) -> None:
        with torch.backends.cudnn.flags(benchmark=True), warpool.predict.recording() as run:
            nn.Conv1d(1, 1, 3).cuda()(floats(1).view(1, 1, -1))
        self.assertIn("torch.backends.cudnn.benchmark is on", str(run.report))

    def test_what_is_not_predicted_is_named(self) -> None:
        def flex() -> Any:
            from torch.nn.attention.flex_attention import flex_attention

            return flex_attention(*(torch.ones(1, 2, 128, 64, device="cuda") for _ in range(3)))

        def sparse() -> Any:
            return torch.sparse_coo_tensor(torch.zeros(2, 3).long().cuda(), torch.ones(3).cuda(), (4, 4))

        def nested() -> Any:
            return torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)], device="cuda", layout=torch.jagged)

        def parallel() -> Any:
            return nn.DataParallel(nn.Linear(4, 4).cuda())

        programs = ((flex, "flex_attention"), (sparse, "sparse"), (nested, "nested"), (parallel, "DataParallel"))
        for program, text in (*programs, (lambda: torch.cuda.MemPool(), "MemPool")):
            with self.subTest(text), self.assertRaisesRegex(PredictionError, f"{text}.* not predicted"):
                recorded(program, gpus=2)

    def test_one_of_the_processes_that_are_spawned_is_predicted(self) -> None:
        import torch.distributed as dist
        import torch.multiprocessing as mp

        seen = []

        def worker(rank: int, world_size: int, kib: int) -> None:
            dist.init_process_group("nccl", rank=rank, world_size=world_size)
            torch.cuda.set_device(rank)
            model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64).cuda(), device_ids=[rank])
            model(floats(kib).view(-1, 64)).sum().backward()
            seen.append((dist.get_rank(), dist.get_world_size(), next(model.parameters()).device.index))

        def program() -> None:
            count = torch.cuda.device_count()
            self.assertIsNone(mp.spawn(worker, args=(count, 16), nprocs=count))
            dist.destroy_process_group()
            self.assertTrue(mp.spawn(worker, (count, 16), count, join=False).join())

        found = recorded(program, gpus=4)
        self.assertIn("torch.multiprocessing.spawn: process 0 of 4 was predicted", found.recorder.remarks)
        recorded(program, rank=2, world_size=4)
        self.assertEqual(seen, [(0, 4, 0)] * 2 + [(2, 4, 2)] * 2)

    def test_rank_of_a_distributed_program(self) -> None:
        import torch.distributed as dist
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

        def program(wrap: Any) -> Any:
            dist.init_process_group("nccl")
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            self.assertEqual((dist.get_rank(), dist.get_world_size()), (1, 4))
            model = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False)).cuda()
            made = wrap(model) or model
            optimizer = torch.optim.Adam(made.parameters())
            for _ in range(2):
                made(torch.ones(8, 1024, device="cuda")).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            objects = [None] * 4
            dist.all_gather_object(objects, 7)
            dist.barrier()
            self.assertEqual(objects, [7] * 4)
            return torch.cuda.memory_allocated() // MIB, made, optimizer

        held = {}
        for name, wrap in (
            ("ddp", lambda model: nn.parallel.DistributedDataParallel(model, device_ids=[1])),
            ("fsdp", lambda model: FullyShardedDataParallel(model, device_id=1)),
            ("fully_shard", lambda model: fully_shard(model) and None),
        ):
            with self.subTest(name):
                run = recorded(lambda: held.update({name: program(wrap)[0]}), rank=1, world_size=4)  # noqa: B023
                self.assertIn("rank 1 of 4", str(run.recorder.remarks))
                self.assertFalse(dist.is_initialized())
        # Parameters and two moments of 8 MiB, and DDP's buckets; FSDP has a quarter.
        self.assertTrue(24 <= held["ddp"] <= 42, held)
        self.assertTrue(6 <= held["fsdp"] < 12 and 6 <= held["fully_shard"] < 12, held)


class OutOfMemory(unittest.TestCase):
    def test_error_is_raised_and_caught(self) -> None:
        def program() -> Any:
            gib = 16
            while True:
                try:
                    return torch.empty(gib << 28, device="cuda").relu()
                except torch.cuda.OutOfMemoryError as error:
                    self.assertIn("Tried to allocate", str(error))
                    gib //= 2

        with warpool.predict.recording(gpu="rtx4060", out_of_memory="raise") as run:
            # 8 GiB less the context hold 2 tensors of 2 GiB.
            self.assertEqual(program().numel(), 2 << 28)
        self.assertEqual((run.report.fits, run.report.peak_allocated_bytes), (True, 4 << 30))

    def test_error_that_is_not_caught_ends_the_program(self) -> None:
        with warpool.predict.recording(gpu="rtx4060", out_of_memory="raise") as run:
            held = floats(4 << 20)
            floats(8 << 20)
            self.fail("it goes on")
        del held
        self.assertEqual((run.report.fits, run.report.peak_allocated_bytes), (False, 12 << 30))

    def test_program_that_goes_on_is_remarked(self) -> None:
        with warpool.predict.recording(gpu="rtx4060") as run:
            floats(9 << 20)
        self.assertIn("--oom raise", str(run.report))


class Reports(unittest.TestCase):
    def test_report_says_whether_it_fits_and_where(self) -> None:
        def program() -> Any:
            return [torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(9)]

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run.pickle"
            with warpool.predict.recording(path, gpu="rtx4060") as run:
                held = program()
                del held
            report = run.report
            self.assertEqual((report.fits, report.peak_allocated_bytes), (False, 9 << 30))
            self.assertEqual((report.out_of_memory["reserved_bytes"], report.smallest_card), (7 << 30, "RTX 3080"))
            self.assertRegex(report.out_of_memory["line"], r"program|listcomp")
            self.assertTrue(report.fits_on("a100-80gb") and not report.fits_on("rtx4060"))
            for words in ("does not fit on RTX 4060", "would have run out of memory at", "expandable", "Who holds it"):
                self.assertIn(words, str(report))
            self.assertEqual(json.loads(report.to_json())["schema_version"], 1)
            found = warpool.explain(path, gpu="rtx4060")
            self.assertEqual((found.moment.allocated_bytes, found.device), (9 << 30, 0))
            self.assertIn("test_predict.py", found.holders[0].line or found.holders[0].name)
            self.assertTrue(warpool.replay(path).fidelity.exact)
            self.assertEqual(len(pickle.loads(path.read_bytes())["device_traces"][0]), 36)

    def test_libraries_take_memory_outside_the_allocator(self) -> None:
        def outside(program: Callable[[], Any]) -> Dict[str, float]:
            with warpool.predict.recording() as run:
                program()
            parts = {part["name"]: part["bytes"] / MIB for part in run.report.context}
            self.assertAlmostEqual(parts.pop("the context of CUDA"), 526.8, delta=0.1)
            self.assertEqual(sum(part["bytes"] for part in run.report.context), run.report.context_bytes)
            return parts

        layer = {"PyTorch's kernels": 92.0, "cuBLAS": 66.0}
        # Each as the difference that was measured on an H200: a training's second thread has handles of its own.
        self.assertEqual(outside(lambda: None), {})
        self.assertEqual(outside(lambda: nn.Linear(8, 8).cuda()(floats(1).view(-1, 8))), layer)
        both = {"PyTorch's kernels": 92.0, "cuBLAS in 2 threads": 132.0}
        self.assertEqual(outside(lambda: nn.Linear(8, 8).cuda()(floats(1).view(-1, 8)).sum().backward()), both)
        both = {"PyTorch's kernels": 92.0, "cuDNN in 2 threads": 16.0}
        self.assertEqual(outside(lambda: nn.Conv1d(1, 1, 3).cuda()(floats(1).view(1, 1, -1)).sum().backward()), both)
        self.assertEqual(outside(lambda: torch.cuda.Stream()), {"a pool of streams": 70.0})

    def test_categories_are_those_of_a_training(self) -> None:
        with warpool.predict.recording() as run:
            train()
        kinds = {row["name"] for row in run.report.categories}
        self.assertLessEqual({"parameters", "optimizer_state", "activations"}, kinds)

    def test_check_fails_above_the_budget(self) -> None:
        report = warpool.predict.check(train, budget="1GiB")
        self.assertGreater(report.peak_reserved_bytes, 0)
        with self.assertRaisesRegex(AssertionError, r"train needs .* more than the budget of 1 MiB"):
            warpool.predict.check(train, budget="1MiB")

    def test_sweep_of_a_function_finds_the_last_that_fits(self) -> None:
        def program(batch: int) -> None:
            torch.empty(batch << 30, dtype=torch.uint8, device="cuda")

        found = warpool.predict.sweep(program, batch=[1, 9, 300])
        sizes = [report.peak_allocated_bytes >> 30 for report in found.reports.values()]
        self.assertEqual(sizes, [1, 9, 300])
        self.assertEqual([found.largest(card) for card in ("rtx4060", "a10", "b200")], [1, 9, 9])
        self.assertIn("The last batch of the sweep that fits", str(found))
        with tempfile.TemporaryDirectory() as folder:
            found.plot(Path(folder) / "sweep.svg")
            self.assertIn("<polyline", (Path(folder) / "sweep.svg").read_text())
        with self.assertRaisesRegex(TypeError, "one keyword argument"):
            warpool.predict.sweep(program)

    def test_everything_is_put_back(self) -> None:
        before = {name: getattr(torch.cuda, name) for name in dir(torch.cuda)}
        forward = nn.Module._apply, torch.Tensor.cuda, torch.nn.Parameter.__new__, torch.compile
        recorded(train)
        self.assertEqual({name: getattr(torch.cuda, name) for name in before}, before)
        self.assertEqual((nn.Module._apply, torch.Tensor.cuda, torch.nn.Parameter.__new__, torch.compile), forward)
        self.assertEqual(torch.ones(3).sum().item(), 3)
        with self.assertRaises(RuntimeError):
            with warpool.predict.recording():
                raise RuntimeError("of the program")
        self.assertFalse(torch.cuda.is_available())

    def test_wrong_options_are_errors_that_say_so(self) -> None:
        for options, text in (
            ({"gpu": "nosuch"}, "nosuch"),
            ({"gpu": "h200", "capacity": "1GiB"}, "not both"),
            ({"capacity": "80"}, "'80' has no unit: write 80GiB or 80B"),
            ({"capacity": "much"}, "is not a size"),
            ({"rank": -1, "world_size": 8}, "-1 is not one of a world size of 8: they are 0 to 7"),
            ({"settings": "no_such_key:1"}, "no_such_key"),
        ):
            with self.subTest(options=options), self.assertRaisesRegex(warpool.OptionError, text):
                with warpool.predict.recording(**options):
                    floats(4)


def train() -> None:
    """Three steps of a small network."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(256, 512),
        nn.LayerNorm(512),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(512, 10),
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        images, labels = torch.randn(8, 3, 32, 32).pin_memory().cuda(non_blocking=True), torch.randint(10, (8,)).cuda()
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def transformer() -> None:
    """An encoder with autocast, checkpoints, a fused optimizer and a loader with workers."""
    from torch.utils.checkpoint import checkpoint
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    loader = DataLoader(TensorDataset(torch.randn(32, 16, 64)), batch_size=8, num_workers=1, pin_memory=True)
    for (batch,) in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = checkpoint(model, batch.cuda(non_blocking=True), use_reentrant=False).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def recurrent() -> None:
    """An LSTM over packed sequences, and SGD."""
    torch.manual_seed(0)
    model = nn.LSTM(16, 32, num_layers=2, batch_first=True, bidirectional=True).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(4, 9, 16).cuda(), torch.tensor([9, 7, 3, 2]), True)
    out, _ = nn.utils.rnn.pad_packed_sequence(model(packed)[0], batch_first=True)
    out.sum().backward()
    optimizer.step()


class Digests(unittest.TestCase):
    def test_what_programs_ask_for_has_not_changed(self) -> None:
        """Sizes, order, streams and operators, without the lines of PyTorch, which differ between its versions."""
        version = ".".join(torch.__version__.split(".")[:2])
        known = json.loads(DIGESTS.read_text()) if DIGESTS.exists() else {}
        found: Dict[str, Any] = {}
        for program in (train, transformer, recurrent):
            run = recorded(program)
            asked_for = words(run)
            text = "\n".join(asked_for).encode()
            found[program.__name__] = [len(asked_for), run.log.peak[0], hashlib.sha256(text).hexdigest()[:16]]
            again = words(recorded(program))
            self.assertEqual(asked_for, again, f"{program.__name__} asks for the same each time")
        if os.environ.get("WARPOOL_WRITE_DIGESTS"):
            DIGESTS.write_text(json.dumps({**known, version: found}, indent=1) + "\n")
        elif version not in known:
            print(
                f"there are no digests for PyTorch {version}: what programs ask for was NOT compared", file=sys.stderr
            )
        else:
            self.assertEqual(found, known[version])

    def test_snapshot_is_the_same_each_time(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            contents = []
            for number in range(2):
                path = Path(folder) / f"{number}.pickle"
                with warpool.predict.recording(path) as run:
                    train()
                contents.append(path.read_bytes())
                del run
            self.assertEqual(*contents)


SCRIPT = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=1)
batch = parser.parse_args().batch
assert torch.cuda.is_available() and __name__ == "__main__"
model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(1000):
    model(torch.empty(batch * 1024, 1024, device="cuda")).sum().backward()
    optimizer.step()
    print("step", number)
"""


class Command(unittest.TestCase):
    def run_command(self, *arguments: str, script: str = SCRIPT) -> "subprocess.CompletedProcess[str]":
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "train.py"
            path.write_text(script)
            options = [each.replace("DIR", folder) for each in arguments]
            at = options.index("--") if "--" in options else len(options)
            command = [sys.executable, "-m", "warpool", "predict", *options[:at], str(path), *options[at:]]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            self.files = {each.name: each.read_text(errors="replace") for each in Path(folder).iterdir()}
            return done

    def test_script_runs_as_it_is_and_ends_after_the_steps(self) -> None:
        done = self.run_command(
            "--gpu", "h200", "--steps", "2", "--json", "-o", "DIR/run.pickle", "--", "--batch", "8"
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        (line,) = done.stdout.splitlines()
        report = json.loads(line)
        self.assertEqual((report["steps"], report["gpu"], report["fits"]), (2, "h200", True))
        self.assertIn("step 0", done.stderr)
        self.assertIn("run.pickle", self.files)

    def test_module_runs_as_a_script_does(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            package = Path(folder) / "package"
            package.mkdir()
            (package / "train.py").write_text(
                "import sys, torch\nprint(__name__, sys.argv[1:], sys.argv[0][-16:])\ntorch.ones(1, device='cuda')\n"
            )

            def run(*arguments: str) -> Any:
                command = [sys.executable, "-m", "warpool", "predict", *arguments]
                # The package under test is found from the other folder, too.
                found = {**os.environ, "PYTHONPATH": str(Path(warpool.__file__).resolve().parent.parent)}
                return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=found)

            done = run("--gpu", "h200", "-q", "-m", "package.train", "--steps", "3", "-m", "x")
            self.assertEqual(done.returncode, 0, done.stderr)
            words = "__main__ ['--steps', '3', '-m', 'x'] package/train.py"
            self.assertEqual(done.stdout.splitlines()[0], words)
            done = run("-m", "nosuch.train")
            self.assertEqual((done.returncode, done.stderr), (2, "error: nosuch.train: there is no such module\n"))

    def test_exit_status_says_whether_it_fits(self) -> None:
        few = ("--steps", "1", "-q")
        self.assertEqual(self.run_command(*few, "--capacity", "600MiB", "--", "--batch", "64").returncode, 1)
        done = self.run_command(*few, "--budget", "1MiB")
        self.assertEqual((done.returncode, "more than the budget" in done.stdout.splitlines()[0]), (1, True))
        done = self.run_command(
            *few,
            script="import torch\nint(torch.empty(1, device='cuda').argmin() + "
            "(torch.empty(2, device='cuda') > 0).sum())\n",
        )
        self.assertEqual(done.returncode, 2)
        self.assertEqual(len(done.stderr.strip().splitlines()), 1, done.stderr)
        self.assertRegex(done.stderr, r"^error: .*train\.py:2 .*--assume train\.py:2=VALUE")

    def test_sweep_finds_the_largest_that_fits(self) -> None:
        done = self.run_command(
            "--steps", "1", "-q", "--capacity", "1000MiB", "--sweep", "batch=1,16,64", "--plot", "DIR/sweep.svg"
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, r"64 .*does not fit")
        self.assertIn("The last batch of the sweep that fits", done.stdout)
        self.assertIn("<polyline", self.files["sweep.svg"])

    def test_script_that_fails_gives_its_traceback_and_no_prediction(self) -> None:
        for what, text in (
            ("raise ValueError('my config')", "ValueError: my config"),
            ("open('/none/such')", "FileNotFoundError"),
            ("1 / 0", "ZeroDivisionError"),
            ("torch.ones(2, 3, device='cuda') @ torch.ones(2, 3, device='cuda')", "RuntimeError"),
        ):
            with self.subTest(what=what):
                done = self.run_command("--json", script=f"import torch\ndef f():\n  {what}\nf()\n")
                self.assertEqual(done.returncode, 2, done.stderr)
                self.assertRegex(done.stderr, r"^Traceback .*\n  File \".*train.py\", line 4, in <module>\n")
                self.assertIn(text, done.stderr)
                self.assertNotIn("runpy", done.stderr)
                self.assertNotIn("warpool/predict/", done.stderr)
                self.assertIn("failed", json.loads(done.stdout)["error"])
        done = self.run_command(script="import sys, torch\ntorch.ones(1).cuda()\nsys.exit('needs 2 GPUs')\n")
        self.assertEqual((done.returncode, "needs 2 GPUs" in done.stderr, done.stdout), (2, True, ""))
        done = self.run_command("--json", script="import torch\ntorch.ones(1).cuda()\nraise KeyboardInterrupt\n")
        self.assertEqual((done.returncode, done.stderr), (130, "error: interrupted: no prediction\n"))
        self.assertEqual(json.loads(done.stdout)["error"], "interrupted: no prediction")
        done = self.run_command(script="print('hello')\n")
        self.assertEqual((done.returncode, "never used CUDA" in done.stderr), (2, True))

    def test_script_that_catches_everything_ends_all_the_same(self) -> None:
        body = "try:\n    (m(torch.ones(8, device='cuda')).sum()).backward(); o.step()\n  except: pass\n"
        script = (
            "import torch\nm = torch.nn.Linear(8, 8).cuda()\no = torch.optim.SGD(m.parameters(), lr=0.1)\n"
            f"while True:\n  {body}"
        )
        done = self.run_command("--steps", "2", "--json", "-q", script=script)
        self.assertEqual((done.returncode, json.loads(done.stdout)["steps"]), (0, 2), done.stderr)

    def test_options_are_checked_before_the_script_runs(self) -> None:
        for arguments in (
            ["--budget", "20"],
            ["--settings", "nonsense:1"],
            ["-o", "/none/such/x"],
            ["--plot", "x.svg"],
        ):
            with self.subTest(arguments=arguments):
                done = self.run_command(*arguments, script="print('it ran')\n")
                self.assertEqual((done.returncode, done.stdout), (2, ""))
                self.assertEqual(len(done.stderr.strip().splitlines()), 1, done.stderr)

    def test_options_after_the_script_are_remarked(self) -> None:
        script = "import torch, sys\ntorch.ones(1).cuda()\nprint(sys.argv[1:])\n"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "train.py"
            path.write_text(script)
            command = [sys.executable, "-m", "warpool", "predict", str(path)]
            for arguments, remarked in ((["--steps", "3"], True), (["--", "--steps", "3"], False)):
                done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
                self.assertIn("['--steps', '3']", done.stdout)
                self.assertEqual("remark: --steps" in done.stderr, remarked, done.stderr)

    def test_wrong_arguments_are_errors_of_one_line(self) -> None:
        for arguments in (["--gpu", "nosuch"], ["--sweep", "batch"], ["--steps", "0"], ["--assume", "x"]):
            done = self.run_command(*arguments)
            self.assertEqual(done.returncode, 2, arguments)
            self.assertEqual(len(done.stderr.strip().splitlines()), 1, done.stderr)
        done = subprocess.run([sys.executable, "-m", "warpool", "predict", "none.py"], capture_output=True, text=True)
        self.assertEqual((done.returncode, "no such file" in done.stderr), (2, True))
        done = subprocess.run([sys.executable, "-m", "warpool", "predict", str(HERE)], capture_output=True, text=True)
        self.assertEqual((done.returncode, "is a folder" in done.stderr), (2, True))


if __name__ == "__main__":
    unittest.main()
