"""Tests of `warpool.explain`, `replay`, `tune`, `diff` and `view`: no PyTorch, no GPU. WARPOOL_ANSWERS_LIBRARY is the
path of the shared object, WARPOOL_COMMAND that of the command, whose JSON must be the same."""

import copy
import io
import json
import lzma
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
import unittest
from pathlib import Path
from typing import Any, Dict, List
from unittest import mock

from isolated import isolated

import warpool
from warpool import _html, _library

RECORDINGS = Path(__file__).resolve().parents[2] / "recordings"
COMMAND = os.environ.get("WARPOOL_COMMAND", "")
SMALL = RECORDINGS / "verdict.fragmentation.pickle.xz"
TIMES = ("replay_seconds", "run_seconds", "parse_seconds", "input_seconds")
LARGE = RECORDINGS / "oom_stacks.fraction_6gib.pickle.xz"


def content(path: Path) -> bytes:
    return lzma.decompress(path.read_bytes())


def snapshot(path: Path = SMALL) -> Dict[str, Any]:
    """As torch.cuda.memory._snapshot() returns it."""
    return pickle.loads(content(path))


def command(*arguments: object) -> List[Dict[str, Any]]:
    """The objects that the command prints."""
    done = subprocess.run([COMMAND, *map(str, arguments), "--json"], stdout=subprocess.PIPE, check=False)
    return [json.loads(line) for line in done.stdout.splitlines()]


def untimed(found: Dict[str, Any]) -> Dict[str, Any]:
    """A replay without the times of this machine."""
    return {key: value for key, value in found.items() if key not in TIMES}


def two_devices() -> Dict[str, Any]:
    """A recording with the same program on two devices; on the second without the event that ran out of memory."""
    one = snapshot()
    trace = [event for event in one["device_traces"][0] if event["action"] != "oom"]
    other = copy.deepcopy(one["segments"])
    for segment in other:
        segment["device"] = 1
    return {**one, "segments": [*one["segments"], *other], "device_traces": [one["device_traces"][0], trace]}


def hostile(text: str) -> Dict[str, Any]:
    """A recording whose frames have this name."""
    found = snapshot()
    frame = {"name": text, "filename": f"/home/{text}/model.py", "line": 7}
    for event in found["device_traces"][0]:
        event["frames"] = [frame]
    for segment in found["segments"]:
        for block in segment["blocks"]:
            block["frames"] = [frame]
    return found


class Loading(unittest.TestCase):
    def setUp(self) -> None:
        _library.library.cache_clear()

    def test_import_loads_nothing(self) -> None:
        program = (
            "import sys, warpool\n"
            "loaded = lambda: 'warpool_answers' in open('/proc/self/maps').read()\n"
            "assert not loaded() and not {'pandas', 'torch', 'html', 'pickle'} & set(sys.modules), sys.modules.keys()\n"
            "warpool.explain(sys.argv[1], fits=False)\n"
            "assert loaded()\n"
        )
        subprocess.run([sys.executable, "-c", program, str(SMALL)], check=True)

    @isolated
    def test_missing_library_is_an_error_that_names_it(self) -> None:
        os.environ["WARPOOL_ANSWERS_LIBRARY"] = "/nowhere/libwarpool_answers.so"
        with self.assertRaisesRegex(warpool.Error, "/nowhere/libwarpool_answers.so"):
            warpool.explain(SMALL)

    @isolated
    def test_file_that_is_not_the_library_is_an_error(self) -> None:
        with tempfile.NamedTemporaryFile(suffix=".so") as file:
            file.write(b"not a library")
            file.flush()
            os.environ["WARPOOL_ANSWERS_LIBRARY"] = file.name
            with self.assertRaisesRegex(warpool.Error, "not Warpool's shared object"):
                warpool.explain(SMALL)

    @isolated
    def test_library_of_another_version_is_an_error(self) -> None:
        _library.__version__ = "0.0.0"
        with self.assertRaisesRegex(warpool.Error, "install both from one version"):
            warpool.explain(SMALL)


class SameAsTheCommand(unittest.TestCase):
    def setUp(self) -> None:
        self.assertTrue(COMMAND, "WARPOOL_COMMAND is not set: that the command's JSON is the same was NOT tested")

    def test_explain_of_every_recording(self) -> None:
        for path in sorted(RECORDINGS.glob("*.pickle.xz")):
            with self.subTest(path.name):
                found = warpool.explain(path, fits=False)
                self.assertEqual([each.to_dict() for each in found.devices], command("explain", "--no-fits", path))

    def test_explain_with_what_would_have_fitted(self) -> None:
        for path in sorted(RECORDINGS.glob("verdict.*.pickle.xz")):
            with self.subTest(path.name):
                self.assertEqual(warpool.explain(path).to_dict(), command("explain", path)[0])

    def test_explain_with_options(self) -> None:
        found = warpool.explain(LARGE, capacity="200GiB", frameworks=["torchvision"], orders=2)
        expected = command("explain", "--capacity", "200GiB", "--framework", "torchvision", "--orders", "2", LARGE)
        self.assertEqual(found.to_dict(), expected[0])
        self.assertNotEqual(found.to_dict(), warpool.explain(LARGE).to_dict())

    def test_replay_of_every_recording(self) -> None:
        for path in sorted(RECORDINGS.glob("*.pickle.xz")):
            with self.subTest(path.name):
                found = [untimed(each.to_dict()) for each in warpool.replay(path).devices]
                self.assertEqual(found, [untimed(each) for each in command("replay", path)])

    def test_replay_with_options(self) -> None:
        found = warpool.replay(SMALL, set={"max_split_size_mb": 64}, capacity="24GiB", orders=3, rounds=2)
        options = ("--set", "max_split_size_mb:64", "--capacity", "24GiB", "--orders", 3, "--rounds", 2)
        self.assertEqual(untimed(found.to_dict()), untimed(command("replay", SMALL, *options)[0]))
        found = warpool.replay(SMALL, settings="expandable_segments:True", allocator="paged")
        options = ("--settings", "expandable_segments:True", "--allocator", "paged")
        self.assertEqual(untimed(found.to_dict()), untimed(command("replay", SMALL, *options)[0]))

    def test_tune(self) -> None:
        other = RECORDINGS / "verdict.limit.pickle.xz"
        found = warpool.tune(SMALL, other, candidates=["max_split_size_mb:32"], orders=2)
        expected = command("tune", SMALL, other, "--try", "max_split_size_mb:32", "--orders", 2)
        self.assertEqual(found.candidates.to_list(), expected)
        self.assertEqual(found.to_dict()["candidates"], expected)

    def test_diff(self) -> None:
        other = RECORDINGS / "verdict.growth.pickle.xz"
        self.assertEqual(warpool.diff(SMALL, other, page=False).to_dict(), command("diff", SMALL, other)[0])

    def test_view_writes_the_same_page(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            page = Path(folder) / "page.html"
            expected = command("view", SMALL, "-o", page)[0]
            found = warpool.view(SMALL)
            self.assertEqual(found.to_dict(), {**expected, "page": None})
            self.assertEqual(found.html, page.read_text(encoding="utf-8"))


class Inputs(unittest.TestCase):
    def test_whatever_has_the_recording_gives_the_same_answer(self) -> None:
        expected = {**warpool.explain(SMALL, orders=2).to_dict(), "file": None}
        given = SMALL.read_bytes()
        with SMALL.open("rb") as file:
            for recording in (given, bytearray(given), memoryview(given), content(SMALL), io.BytesIO(given), file):
                with self.subTest(type(recording).__name__):
                    self.assertEqual(warpool.explain(recording, orders=2).to_dict(), expected)
        self.assertEqual(warpool.explain(snapshot(), orders=2).to_dict(), expected)
        self.assertEqual(warpool.explain(str(SMALL), orders=2).to_dict(), {**expected, "file": str(SMALL)})

    def test_what_is_no_recording_is_a_type_error(self) -> None:
        for wrong in (None, 7, ["a"], io.StringIO("text"), object()):
            with self.subTest(wrong), self.assertRaises(TypeError):
                warpool.explain(wrong)  # type: ignore[arg-type]

    def test_path_that_is_not_text(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(os.fsencode(folder), b"\xff.pickle")
            with open(path, "wb") as file:
                file.write(SMALL.read_bytes())
            self.assertEqual(warpool.explain(os.fsdecode(path), fits=False).verdict, "fragmentation")

    def test_missing_file_and_folder_are_os_errors(self) -> None:
        with self.assertRaises(FileNotFoundError) as raised:
            warpool.explain("/nowhere/oom.pickle")
        self.assertEqual(raised.exception.filename, "/nowhere/oom.pickle")
        with self.assertRaises(IsADirectoryError):
            warpool.view(RECORDINGS)
        with self.assertRaisesRegex(ValueError, "a zero in it"):
            warpool.explain("oom\0.pickle")

    def test_hostile_content_is_an_input_error(self) -> None:
        whole, plain = SMALL.read_bytes(), content(SMALL)
        cases = {
            "empty": b"",
            "text": b"hello",
            "compressed, cut off": whole[:-20],
            "cut off": plain[: len(plain) // 2],
            "another pickle": pickle.dumps([1, 2, 3]),
            "code": pickle.dumps(os.path.join),
            "huge numbers": pickle.dumps({"segments": [], "device_traces": [[_event(size=1 << 62, addr=1 << 63)]]}),
            "negative": pickle.dumps({"segments": [], "device_traces": [[_event(size=-1)]]}),
            "nothing": pickle.dumps({"segments": [], "device_traces": []}),
        }
        for name, given in cases.items():
            for function in (warpool.explain, warpool.view):
                with self.subTest(f"{name}, {function.__name__}"), self.assertRaises(warpool.InputError) as raised:
                    function(given)
                self.assertIsInstance(raised.exception, (warpool.Error, ValueError))
        with self.assertRaises(warpool.InputError):
            warpool.diff(SMALL, b"hello")
        with self.assertRaisesRegex(warpool.InputError, "raise memory_limit"):
            warpool.explain(LARGE, memory_limit="1MiB")

    def test_damaged_bytes_give_an_answer_or_an_input_error(self) -> None:
        plain = content(SMALL)
        for at in range(0, len(plain), max(1, len(plain) // 150)):
            damaged = plain[:at] + bytes([plain[at] ^ 0x55]) + plain[at + 1 :]
            try:
                self.assertIsInstance(warpool.explain(damaged, fits=False), warpool.Explanation)
            except warpool.InputError:
                pass


def _event(**values: Any) -> Dict[str, Any]:
    return {"action": "alloc", "addr": 1 << 40, "size": 512, "stream": 0, "time_us": 0, "frames": [], **values}


class Options(unittest.TestCase):
    def test_unknown_option_is_a_type_error(self) -> None:
        with self.assertRaises(TypeError):
            warpool.explain(SMALL, colour="red")  # type: ignore[call-arg]

    def test_size_is_bytes_or_has_a_unit(self) -> None:
        for size in (200 << 30, "200GiB"):
            with self.subTest(size):
                found = warpool.explain(SMALL, capacity=size, orders=1)
                self.assertEqual(found.on_device.device_bytes_total, 200 << 30)
                self.assertEqual((found.device_origin, found.device_name), ("inferred", "H200"), "it ran there")
        for wrong in ("80", "80 apples", "", -1, 1 << 64):
            with self.subTest(wrong), self.assertRaises(warpool.OptionError):
                warpool.explain(SMALL, capacity=wrong)
        for wrong in (True, 80e9, [80]):
            with self.subTest(wrong), self.assertRaises(TypeError):
                warpool.explain(SMALL, capacity=wrong)  # type: ignore[arg-type]

    def test_values_that_an_option_cannot_have(self) -> None:
        for options in ({"orders": 0}, {"orders": 1001}, {"gpu": "nosuch"}, {"gpu": "x", "capacity": 1}):
            with self.subTest(options), self.assertRaises(warpool.OptionError):
                warpool.explain(SMALL, **options)  # type: ignore[arg-type]
        for options in ({"orders": "8"}, {"orders": True}, {"frameworks": [1]}):
            with self.subTest(options), self.assertRaises(TypeError):
                warpool.explain(SMALL, **options)  # type: ignore[arg-type]
        with self.assertRaisesRegex(warpool.OptionError, "no device 3 in the recording, only 0"):
            warpool.explain(SMALL, fits=False, device=3)

    def test_moment_is_chosen(self) -> None:
        for at in ("allocated", "reserved", "oom", 7, "1us"):
            with self.subTest(at):
                found = warpool.explain(SMALL, at=at, fits=False)
                self.assertEqual(found.to_dict(), command("explain", "--no-fits", "--at", at, SMALL)[0])
                self.assertEqual(found.moment.kind, at if at in ("allocated", "reserved", "oom") else "event")
        self.assertEqual(warpool.explain(SMALL, at=7, fits=False).moment.event, 7)
        self.assertEqual(warpool.explain(SMALL, fits=False).moment.kind, "oom")
        growth = RECORDINGS / "verdict.growth.pickle.xz"
        found = warpool.diff(SMALL, growth, at="oom", page=False)
        self.assertEqual(found.to_dict(), command("diff", "--at", "oom", SMALL, growth)[0])
        self.assertEqual((found.before.moment, found.after.moment), ("oom", "oom"))
        for wrong in ("noon", -1, "", 1 << 64):
            with self.subTest(wrong), self.assertRaises(warpool.OptionError):
                warpool.explain(SMALL, at=wrong, fits=False)

    def test_card_is_chosen_by_name(self) -> None:
        resnet = RECORDINGS / "resnet_train.native.pickle.xz"
        found = warpool.explain(resnet, gpu="rtx4090", orders=1)
        self.assertEqual(found.to_dict(), command("explain", "--gpu", "rtx4090", "--orders", 1, resnet)[0])
        self.assertIs(found.on_device.fits, True)
        self.assertEqual((found.device_bytes_total, found.device_origin), (None, "unknown"), "it did not run there")
        self.assertIsNone(warpool.explain(resnet, fits=False).on_device)

    def test_largest_capacity_is_accepted(self) -> None:
        self.assertEqual(warpool.explain(SMALL, capacity=(1 << 64) - 1, orders=1).verdict, "fragmentation")


class Answers(unittest.TestCase):
    def test_explanation_has_attributes_and_words(self) -> None:
        found = warpool.explain(SMALL, orders=2)
        self.assertEqual(found.verdict, found["verdict"])
        self.assertEqual(found.moment.kind, found.to_dict()["moment"]["kind"])
        self.assertEqual(found.holders[0].bytes, found["holders"][0]["bytes"])
        self.assertGreaterEqual(len(found.fits), 1)
        self.assertIsNone(found.growth)
        self.assertIn("holders", dir(found))
        self.assertFalse(hasattr(found, "nosuch"))
        self.assertEqual(repr(found), f"<Explanation: {found.headline}>")
        self.assertTrue(str(found).startswith(found.headline + "\n"))
        self.assertEqual(found.devices, (found,))

    def test_changing_the_dictionary_does_not_change_the_answer(self) -> None:
        found = warpool.explain(SMALL, fits=False)
        found.to_dict()["moment"]["kind"] = "changed"
        self.assertNotEqual(found.moment.kind, "changed")

    def test_answer_can_be_copied_and_pickled(self) -> None:
        found = warpool.explain(SMALL, fits=False)
        for again in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
            self.assertEqual(again, found)
            self.assertEqual((again.headline, again.verdict), (found.headline, found.verdict))

    def test_empty_table_is_a_table(self) -> None:
        found = warpool.explain(SMALL, fits=False)
        self.assertEqual(found.fits, [])
        self.assertIsInstance(found.fits, warpool.Records)

    def test_device_that_ran_out_of_memory_comes_first(self) -> None:
        given = two_devices()
        found = warpool.explain(given, fits=False)
        self.assertEqual([each.device for each in found.devices], [0, 1])
        self.assertEqual((found.device, found.ooms), (0, 1))
        turned = {**given, "device_traces": given["device_traces"][::-1]}
        self.assertEqual(warpool.explain(turned, fits=False).device, 1)
        chosen = warpool.explain(given, fits=False, device=1)
        self.assertEqual((chosen.device, chosen.verdict, len(chosen.devices)), (1, "fitted", 2))
        self.assertIn("All devices", found._repr_html_())
        self.assertEqual(len(warpool.view(given).devices), 2)
        self.assertEqual([each.device for each in warpool.view(given, device=1).devices], [1])

    def test_replay(self) -> None:
        found = warpool.replay(SMALL)
        self.assertEqual((found.outcome, found.fits), ("out_of_memory", False))
        self.assertIn("Tried to allocate 400.00 MiB", str(found))
        self.assertIn("In force", found._repr_html_())
        found = warpool.replay(SMALL, set={"expandable_segments": True}, rounds=3)
        self.assertEqual((found.outcome, found.fits, len(found.rounds)), ("completed", True, 3))
        self.assertTrue(found.headline.startswith("completed: "), found.headline)
        for wrong in ({"settings": "nosuch:1"}, {"set": ["a"]}, {"allocator": "x"}, {"rounds": 0}):
            with self.subTest(wrong), self.assertRaises(warpool.OptionError):
                warpool.replay(SMALL, **wrong)  # type: ignore[arg-type]

    def test_snapshot_without_a_history(self) -> None:
        given = {**snapshot(), "device_traces": [[]]}
        found = warpool.replay(given)
        self.assertEqual((found.outcome, found.fits), ("no_history", None))
        self.assertTrue(found.headline.startswith("no history: "), found.headline)
        self.assertIn("nothing can be replayed", found._repr_html_())
        self.assertEqual(warpool.explain(given).verdict, "unknown")
        for function in (warpool.tune, lambda given: warpool.replay(given, capacity="80GiB")):
            with self.assertRaisesRegex(warpool.InputError, "no device memory events"):
                function(given)

    def test_tuning(self) -> None:
        found = warpool.tune(SMALL, orders=1)
        self.assertEqual(found.headline, found.recommendation)
        assert found.best is not None
        self.assertTrue(found.best.fits)
        self.assertIn("Settings, the best first", found._repr_html_())
        with self.assertRaises(TypeError):
            warpool.tune()
        with self.assertRaises(TypeError):
            warpool.tune(SMALL, candidates="max_split_size_mb:32")
        with self.assertRaises(warpool.OptionError):
            warpool.tune(SMALL, candidates=["nosuch:1"])

    def test_difference(self) -> None:
        found = warpool.diff(SMALL, RECORDINGS / "verdict.growth.pickle.xz", page=False)
        self.assertIn("The second recording has 2.2 GiB more allocated", found.headline)
        self.assertGreater(len(found.changes), 0)
        self.assertIsNone(found.page)
        with self.assertRaisesRegex(ValueError, "page=True"):
            found.save("page.html")
        self.assertIn("What changed", found._repr_html_())


class Readme(unittest.TestCase):
    def test_example_shows_what_it_says(self) -> None:
        text = (RECORDINGS.parent / "python" / "README.md").read_text(encoding="utf-8")
        example = text.split("## Answers about recordings\n")[1].split("```python\n")[1].split("```")[0]
        names: Dict[str, Any] = {}
        example = example.replace('"recordings/', f'"{RECORDINGS}/')
        exec("\n".join(line for line in example.splitlines() if line.startswith(("import", "found = "))), names)
        shown = re.findall(r"^(found\.\S+) +# ('.*')$", example, re.MULTILINE)
        self.assertEqual([repr(eval(value, names)) for value, _ in shown], [expected for _, expected in shown])
        self.assertGreaterEqual(len(shown), 3)


class Pandas(unittest.TestCase):
    def test_tables_are_data_frames(self) -> None:
        frames = types.SimpleNamespace(DataFrame=lambda rows: ("frame", rows))
        found = warpool.explain(SMALL, orders=2)
        with mock.patch.dict(sys.modules, {"pandas": frames}):
            self.assertEqual(found.to_pandas(), ("frame", found.to_dict()["holders"]))
            self.assertEqual(found.to_pandas("fits"), ("frame", found.to_dict()["fits"]))
            self.assertEqual(found.holders[:1].to_pandas(), ("frame", found.to_dict()["holders"][:1]))
            with self.assertRaisesRegex(ValueError, "'verdict' is not a table of Explanation: there are .*holders"):
                found.to_pandas("verdict")

    def test_without_pandas_is_an_import_error_that_says_what_to_do(self) -> None:
        found = warpool.explain(SMALL, fits=False)
        with mock.patch.dict(sys.modules, {"pandas": None}), self.assertRaisesRegex(ImportError, "pip install pandas"):
            found.to_pandas()

    def test_with_pandas_itself(self) -> None:
        try:
            import pandas  # noqa: F401
        except ImportError:
            self.skipTest("pandas is not installed: DataFrames were tested with a stand-in only")
        found = warpool.explain(SMALL, orders=2)
        frame = found.to_pandas()
        self.assertEqual(list(frame.columns), list(found.holders[0]))
        self.assertEqual(frame["bytes"].sum(), sum(holder.bytes for holder in found.holders))
        self.assertEqual(len(warpool.explain(SMALL, fits=False).to_pandas("fits")), 0)


class Notebook(unittest.TestCase):
    TEXT = "<script>alert(1)</script>\"'&"

    def test_explanation_escapes_what_recordings_contain(self) -> None:
        found = warpool.explain(hostile(self.TEXT), fits=False)
        self.assertIn(self.TEXT, found.holders[0].name)
        html = found._repr_html_()
        self.assertNotIn("<script", html)
        self.assertIn("&lt;script&gt;alert(1)", html)
        self.assertIn("Who held memory", html)
        self.assertIn("&lt;script", found.holders._repr_html_())

    def test_page_is_in_a_sandbox(self) -> None:
        html = warpool.view(hostile(self.TEXT))._repr_html_()
        self.assertTrue(html.startswith('<iframe sandbox="allow-scripts" '))
        self.assertEqual(html.count("<"), 2, "the page is in an attribute, with its brackets escaped")
        self.assertEqual(html.count('"'), 6, "and with its quotes escaped")

    def test_large_page_is_to_be_saved(self) -> None:
        found = warpool.view(SMALL)
        with mock.patch.object(_html, "SHOWN_BYTES_MAX", 1000):
            html = found._repr_html_()
        self.assertNotIn("<iframe", html)
        self.assertIn(".save(path)", html)

    def test_difference_is_shown_as_its_page(self) -> None:
        found = warpool.diff(SMALL, RECORDINGS / "verdict.growth.pickle.xz")
        self.assertTrue(found._repr_html_().startswith("<iframe sandbox="))
        self.assertIn("verdict.growth.pickle.xz", found.html)

    def test_sizes_are_written_as_by_the_command(self) -> None:
        cases = {0: "0 B", 1023: "1023 B", 1536: "1.5 KiB", 6 << 30: "6 GiB", 1 << 40: "1 TiB"}
        self.assertEqual({size: _html.size_text(size) for size in cases}, cases)

    def test_page_replaces_pages_only(self) -> None:
        found = warpool.view(SMALL)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "report.html"
            self.assertEqual(found.save(path), path)
            self.assertEqual(found.save(str(path)), path)
            self.assertEqual(path.read_text(encoding="utf-8"), found.html)
            path.write_text("my notes")
            with self.assertRaises(FileExistsError):
                found.save(path)
            self.assertEqual(path.read_text(), "my notes")
            with self.assertRaises(FileNotFoundError):
                found.save(Path(folder) / "nowhere" / "report.html")
            self.assertEqual(os.listdir(folder), ["report.html"], "no draft is left")


class Running(unittest.TestCase):
    def test_threads_at_once(self) -> None:
        names = ["growth", "limit", "outside", "fragmentation"] * 4
        found: List[Any] = [None] * len(names)

        def explain(at: int) -> None:
            path = RECORDINGS / f"verdict.{names[at]}.pickle.xz"
            found[at] = warpool.explain(path, gpu="h200", orders=1).verdict

        threads = [threading.Thread(target=explain, args=(at,)) for at in range(len(names))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(found, names)

    def test_progress_is_told_on_the_thread_that_asked(self) -> None:
        seen = []

        def progress(stage: str, done: int, total: int) -> None:
            seen.append((stage, done, total, threading.current_thread() is threading.main_thread()))

        warpool.explain(LARGE, orders=4, progress=progress)
        self.assertTrue(seen)
        self.assertTrue(all(on_main for *_, on_main in seen))
        self.assertTrue({stage for stage, *_ in seen} <= {"starting", "reading", "replaying", "writing"})

    def test_exception_of_progress_stops_it(self) -> None:
        class Enough(Exception):
            pass

        def progress(stage: str, done: int, total: int) -> None:
            if stage == "replaying":
                raise Enough

        with self.assertRaises(Enough):
            warpool.explain(LARGE, orders=1000, progress=progress)
        self._ends("warpool explain")

    def test_ctrl_c_interrupts(self) -> None:
        program = (
            "import sys, threading, time, warpool\n"
            "begun = lambda stage, *_: stage == 'replaying' and print('begun', flush=True)\n"
            "try:\n"
            "    warpool.explain(sys.argv[1], orders=1000, progress=begun)\n"
            "except KeyboardInterrupt:\n"
            "    print('interrupted', flush=True)\n"
            "    for thread in threading.enumerate():\n"
            "        if thread is not threading.current_thread(): thread.join(60)\n"
            "    print(len(threading.enumerate()), warpool.explain(sys.argv[2], fits=False).verdict, flush=True)\n"
        )
        arguments = [sys.executable, "-c", program, str(LARGE), str(SMALL)]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as running:
            assert running.stdout is not None
            self.assertEqual(running.stdout.readline(), "begun\n")
            asked = time.monotonic()
            running.send_signal(signal.SIGINT)
            lines = [line for line in running.stdout if line != "begun\n"]
        self.assertEqual(lines, ["interrupted\n", "1 fragmentation\n"])
        self.assertEqual(running.returncode, 0)
        # Replays in a thousand orders would take minutes.
        self.assertLess(time.monotonic() - asked, 30)

    @isolated
    def test_forked_child_asks_while_the_parent_does(self) -> None:
        thread = threading.Thread(target=lambda: warpool.explain(LARGE, orders=2))
        thread.start()
        children = []
        for _ in range(4):
            time.sleep(0.05)
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    status = int(warpool.explain(SMALL, orders=1).verdict != "fragmentation")
                finally:
                    os._exit(status)
            children.append(child)
        for child in children:
            self.assertEqual(os.waitpid(child, 0)[1], 0)
        thread.join()

    @isolated
    def test_at_the_exit_of_the_interpreter(self) -> None:
        program = (
            "import atexit, sys, warpool\n"
            "atexit.register(lambda: print(warpool.explain(sys.argv[1], fits=False).verdict))\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, str(SMALL)], stdout=subprocess.PIPE, text=True, check=True
        )
        self.assertEqual(done.stdout, "fragmentation\n")

    @isolated
    def test_memory_does_not_grow(self) -> None:
        def rounds(count: int) -> int:
            for _ in range(count):
                warpool.explain(SMALL, fits=False)
                warpool.view(SMALL)
                try:
                    warpool.explain(b"hello")
                except warpool.InputError:
                    pass
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

        before = rounds(50)
        # The answers of 200 rounds have more than 40 MB.
        self.assertLess(rounds(200) - before, 8 << 20)

    def _ends(self, name: str) -> None:
        """Waits until no thread of that name is left."""
        deadline = time.monotonic() + 60
        while any(thread.name == name for thread in threading.enumerate()):
            self.assertLess(time.monotonic(), deadline, "the work goes on")
            time.sleep(0.05)


if __name__ == "__main__":
    unittest.main()
