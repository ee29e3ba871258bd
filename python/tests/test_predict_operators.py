"""Tests of what operators ask for inside: the rules against measurements that they were not fitted to.

`predict_operators.jsonl` has a few of them, from `python -m warpool.predict.calibrate sample RAW`: a call and the
events of PyTorch's allocator on an H200. Needs no PyTorch, but for the last test, which says so where it is missing.
"""

import json
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from warpool.predict import calls, fit, operators
from warpool.predict.calls import Array, Call

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

TABLE = operators.Table.load("h200")
SAMPLES = [
    fit.sample(*json.loads(line))
    for line in Path(__file__).with_name("predict_operators.jsonl").read_text().splitlines()
]


def array(*shape: int, dtype: str = "float32") -> Array:
    return Array(dtype, shape, calls.contiguous_strides(shape))


def call(name: str, *outputs: Array, **arguments: object) -> Call:
    return Call(name, arguments, list(outputs))


class Rules(unittest.TestCase):
    def peaks(self, sample: fit.Sample) -> tuple:
        steps = TABLE.of(sample.call)
        outputs = sample.call.outputs
        return fit.peak(sample.events, outputs), fit.peak(steps.order, outputs)

    def test_order_has_each_output_once_and_frees_what_was_allocated(self) -> None:
        for sample in SAMPLES:
            steps = TABLE.of(sample.call)
            if steps is None:
                continue
            made = sorted(it[1] for it in steps.order if it[0] == "output")
            self.assertEqual(made, list(range(len(sample.call.outputs))), sample.call.name)
            live = set()
            for step in steps.order:
                if step[0] == "alloc":
                    self.assertGreaterEqual(step[2], 0, sample.call.name)
                    self.assertNotIn(step[1], live, sample.call.name)
                    live.add(step[1])
                elif step[0] == "free":
                    self.assertIn(step[1], live, sample.call.name)
                    live.remove(step[1])

    def test_formulas_are_exact(self) -> None:
        tried = 0
        for sample in SAMPLES:
            rule = TABLE.operators.get(sample.call.name, {})
            if "formula" in rule and not rule.get("error"):
                real, told = self.peaks(sample)
                self.assertLess(abs(real - told), 512, sample)
                tried += 1
        self.assertGreater(tried, 50)

    def test_other_rules_are_within_their_error(self) -> None:
        off, total, stated = 0, 0, 0.0
        for sample in SAMPLES:
            rule = TABLE.operators.get(sample.call.name, {})
            if "tree" in rule or "near" in rule or rule.get("error"):
                real, told = self.peaks(sample)
                off, total = off + abs(real - told), total + real
                stated += rule.get("error", 0.0005) * real
        self.assertGreater(total, 0)
        # The stated errors are means over more calls than these.
        self.assertLess(off, 1.5 * stated + 0.01 * total)

    def test_operators_that_ask_for_outputs_only(self) -> None:
        tried = [it for it in SAMPLES if it.call.name in TABLE.only_outputs]
        self.assertGreater(len(tried), 50)
        for sample in tried:
            self.assertEqual(fit.sizes_of(sample.events), [])

    def test_operators_that_were_not_measured_follow_from_the_source(self) -> None:
        small, large = array(2, 8, 4, 4), array(2, 8, 8, 8)
        nearest = "aten.upsample_nearest2d.default"
        self.assertEqual(TABLE.of(call(nearest, large, self=small)).order, [("output", 0)])
        turned = small._replace(stride=(128, 1, 8, 32))
        self.assertEqual(fit.sizes_of(TABLE.of(call(nearest, large, self=turned)).order), [small.nbytes])
        last = [it._replace(stride=(8 * it.shape[2] * it.shape[3], 1, 8 * it.shape[3], 8)) for it in (small, large)]
        self.assertEqual(TABLE.of(call(nearest, last[1], self=last[0])).order, [("output", 0)])
        grad, made = large._replace(stride=(1024, 64, 8, 1)), array(2, 8, 4, 4)
        back = TABLE.of(call("aten.upsample_nearest2d_backward.default", made, grad_output=grad))
        self.assertEqual(back.order[1], ("alloc", "grad_output", large.nbytes))
        # The same kernel as one that was measured.
        images = last[1]._replace(shape=(64, 8, 64, 64), stride=(32768, 1, 512, 8))
        norm = dict(input=images, weight=array(8), training=True)
        orders = [
            TABLE.of(call(f"aten.{name}.default", images, array(8), array(8), **norm)).order
            for name in ("native_batch_norm", "_native_batch_norm_legit")
        ]
        self.assertEqual(*orders)

    def test_an_unknown_operator_has_no_steps(self) -> None:
        self.assertIsNone(TABLE.of(call("aten.never_heard_of.default", array(3))))
        self.assertIsNone(TABLE.error("aten.never_heard_of.default"))

    def test_a_reduction_follows_the_card(self) -> None:
        asked = call("aten.sum.default", array(), self=array(10_000_000))
        large = fit.sizes_of(TABLE.of(asked).order)
        small = operators.Table({**TABLE.rules, "multiprocessors": 40})
        self.assertGreater(sum(large), sum(fit.sizes_of(small.of(asked).order)))

    def test_a_mean_loss_keeps_the_memory_of_all_losses(self) -> None:
        losses = array(256, 4096)
        self.assertEqual(
            TABLE.of(call("aten.mse_loss.default", array(), self=losses, target=losses)).sizes, {0: 4 << 20}
        )
        each = call("aten.mse_loss.default", losses, self=losses, target=losses, reduction=0)
        self.assertEqual(TABLE.of(each).sizes, {})

    def test_a_sum_of_losses_of_logits_is_as_on_an_h200(self) -> None:
        images = array(128, 3, 128, 128)
        name = "aten.binary_cross_entropy_with_logits.default"
        order = TABLE.of(call(name, array(), self=images, target=images, reduction=2)).order
        self.assertEqual([step[0] for step in order[:3]], ["alloc", "alloc", "output"])
        self.assertEqual([step[2] for step in order if step[0] == "alloc"], [images.nbytes] * 2 + [2112, 4])

    def test_slices_of_a_gradient_do_not_grow_with_the_batch(self) -> None:
        # Measured on an H200: copies of all three, and 8 slices of the weights.
        images, weight, out = array(2048, 32, 20, 20), array(64, 32, 4, 4), array(2048, 64, 9, 9)
        found = call("aten.convolution_backward.default", weight, grad_output=out, input=images, weight=weight)
        found.arguments.update(stride=[2, 2], padding=[0, 0], dilation=[1, 1], transposed=False, groups=1)
        found.arguments.update(output_mask=[False, True, False])
        (workspace,) = fit.sizes_of(TABLE.of(found).order)
        self.assertAlmostEqual(workspace / 148_504_720, 1, delta=0.02)

    def test_a_long_ctc_loss_with_infinities_makes_its_gradient_twice(self) -> None:
        guess, alpha = array(300, 32, 1000), array(32, 300, 81)
        found = call("aten._ctc_loss_backward.default", guess, log_probs=guess, log_alpha=alpha, zero_infinity=True)
        order = TABLE.of(found).order
        self.assertIn(("alloc", "gradient", guess.nbytes), order)
        self.assertLess(order.index(("output", 0)), order.index(("free", "gradient")))

    def test_an_lstm_takes_the_workspace_that_was_measured(self) -> None:
        # Input, sequences first, states, layers, directions, dropout; workspace on an H200.
        measured = [
            ((173, 44, 128), False, 256, 3, 1, 0.0, 75_156_064),
            ((64, 8, 80), False, 512, 2, 1, 0.2, 36_798_784),
            ((16, 64, 32), False, 768, 4, 1, 0.2, 126_878_464),
            ((9, 1, 128), False, 512, 3, 2, 0.2, 111_559_456),
            ((32, 300, 512), True, 640, 4, 2, 0.1, 580_256_256),
        ]
        for shape, batch_first, hidden, layers, directions, dropout, workspace in measured:
            widths = [shape[-1]] + [hidden * directions] * (layers - 1)
            weights = [array(4 * hidden, n) for width in widths for _ in range(directions) for n in (width, hidden)]
            found = call(
                "aten._cudnn_rnn.default",
                input=array(*shape),
                weight=weights,
                mode=2,
                hidden_size=hidden,
                num_layers=layers,
                batch_first=batch_first,
                dropout=dropout,
                train=True,
                bidirectional=directions == 2,
                batch_sizes=[],
            )
            self.assertIn(("alloc", "workspace", workspace), TABLE.of(found).order, shape)

    def test_convolutions_unlike_any_that_was_measured_are_guesses(self) -> None:
        spread = {"padding": (0, 0), "dilation": (1, 1), "transposed": False, "output_padding": (0, 0), "groups": 1}

        def is_guess(image: Array, weight: Array, output: Array, stride: tuple) -> bool:
            given = {"input": image, "weight": weight, "bias": None, "stride": stride, **spread}
            return TABLE.of(call("aten.convolution.default", output, **given)).is_guess

        measured = [it for it in SAMPLES if it.call.name == "aten.convolution.default"]
        self.assertLess(sum(TABLE.of(it.call).is_guess for it in measured), len(measured) / 2)
        image, output = array(2, 64, 56, 56, dtype="float16"), array(2, 64, 54, 54, dtype="float16")
        self.assertFalse(is_guess(image, array(64, 64, 3, 3, dtype="float16"), output, (1, 1)))
        image, output = array(3, 5, 900, 30, dtype="float16"), array(3, 301, 67, 3, dtype="float16")
        self.assertTrue(is_guess(image, array(301, 5, 41, 3, dtype="float16"), output, (13, 13)))

    def test_what_cublas_keeps(self) -> None:
        out, left, right = array(4, 4), array(4, 8), array(8, 4)
        self.assertEqual(operators.kept(call("aten.mm.default", out, self=left, mat2=right)), [("cublas", 32 << 20)])
        linear = call("aten.addmm.default", out, self=array(4), mat1=left, mat2=right)
        self.assertEqual(operators.kept(linear), [("cublas", 32 << 20), ("cublaslt", 1 << 20)])

    def test_the_table_is_small_and_says_what_it_holds_for(self) -> None:
        for path in operators.TABLES.glob("*.json"):
            self.assertLess(path.stat().st_size, 300 << 10)
            rules = json.loads(path.read_text())
            for name in ("torch", "cuda", "cudnn", "card", "how"):
                self.assertTrue(rules[name], name)


class WithTorch(unittest.TestCase):
    def setUp(self) -> None:
        if torch is None:
            print("\nPyTorch is not installed: operators of real functions were NOT tested", file=sys.stderr)
            self.skipTest("no PyTorch")

    def test_calls_of_real_operators(self) -> None:
        x = torch.empty(64, 512, 7, 7, device="meta")
        out = torch.empty(512, device="meta")
        steps = TABLE.steps(torch.ops.aten.sum.dim_IntList, (x, [0, 2, 3]), {}, [out])
        self.assertEqual(steps.order[0], ("output", 0))
        y = torch.empty(64, 512, device="meta")
        self.assertEqual(TABLE.steps(torch.ops.aten.relu.default, (y,), {}, [y]).order, [("output", 0)])
        kept = TABLE.steps(torch.ops.aten.mm.default, (y, y.t()), {}, [torch.empty(64, 64, device="meta")]).kept
        self.assertEqual(kept, [("cublas thread", 32 << 20)])
        self.assertIsNone(TABLE.steps(torch.ops.aten._fft_c2r.out, (y,), {}, [y]))


if __name__ == "__main__":
    unittest.main()
