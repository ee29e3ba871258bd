#!/usr/bin/env python3
"""Tests of the page that `scripts/web` builds, in a real browser.

    page.py WARPOOL [--page FOLDER] [--large] [NAME...]

WARPOOL is the built command, whose answers the page's must equal; FOLDER is target/web. `--large` also has a recording
of 100 MB answered, which takes a minute. """

import functools
import http.server
import json
import os
import subprocess
import sys
import tempfile
import threading
import time

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.join(HERE, "../../..")
sys.path[:0] = [HERE, os.path.join(ROOT, "crates/cli/tests/browser")]

from devtools import Browser, BrowserError, Page  # noqa: E402
from expect import equal, holds  # noqa: E402
import snapshots  # noqa: E402

RECORDINGS = os.path.join(ROOT, "recordings")
DATA = os.path.join(ROOT, "crates/trace/tests/data")
CORPUS = os.path.join(ROOT, "fuzz/corpus/recording")
LARGE_BYTES = 100_000_000
CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


class Server:
    """A web server of a folder, on this machine only, that may be stopped."""

    def __init__(self, folder):
        class Handler(http.server.SimpleHTTPRequestHandler):
            def log_message(self, *_):
                pass

        handler = functools.partial(Handler, directory=folder)
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}/"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def stop(self):
        self.server.shutdown()
        self.server.server_close()


class WebPage(Page):
    """A tab with the page."""

    def ask(self, action, seconds=120):
        """Does something that has the page make an answer, and waits for it."""
        self.evaluate("document.documentElement.dataset.state = 'asked'")
        action()
        self.wait("['answered', 'failed'].includes(document.documentElement.dataset.state)", seconds)
        return self.evaluate("document.documentElement.dataset.state")

    def choose(self, *paths, seconds=120):
        """Chooses files, and returns the answer about them."""
        found = self.call("Runtime.evaluate", expression="document.getElementById('files')")["result"]["objectId"]
        paths = [os.path.abspath(path) for path in paths]
        state = self.ask(lambda: self.call("DOM.setFileInputFiles", files=paths, objectId=found), seconds)
        equal(state, "answered", f"{paths}: {self.text('#problem')}")
        return self.evaluate("warpool.answer")

    def click_on(self, selector):
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def frame(self, seconds=60):
        """The viewer in its frame, once it has drawn itself."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for event in self.browser.events:
                info = event.get("params", {}).get("targetInfo", {})
                if event["method"] == "Target.attachedToTarget" and info.get("type") == "iframe":
                    frame = Page(self.browser, event["params"]["sessionId"], info["targetId"])
                    self.browser.events.remove(event)
                    for domain in ["Runtime", "Log", "Network"]:
                        frame.call(f"{domain}.enable")
                    frame.wait("document.documentElement?.dataset.ready === 'true'", seconds)
                    return frame
            self.evaluate("1")
            time.sleep(0.05)
        raise BrowserError("the viewer did not open")


class Context:
    """The command, the browser, and the served page."""

    def __init__(self, warpool, browser, server, folder):
        self.warpool, self.browser, self.server, self.folder = warpool, browser, server, folder
        browser.own = (server.address, "blob:", "data:")

    def open(self):
        target = self.browser.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = WebPage(self.browser, session, target)
        for domain in ["Page", "Runtime", "Log", "Network", "DOM"]:
            page.call(f"{domain}.enable")
        # The frame of the viewer is a target of its own, since it has another origin.
        page.call("Target.setAutoAttach", autoAttach=True, waitForDebuggerOnStart=False, flatten=True)
        page.call("Page.navigate", url=self.server.address)
        page.wait("document.documentElement?.dataset.state === 'idle'")
        return page

    def run(self, *arguments):
        """The objects that the command prints; those of files that it can read, if it fails for others."""
        done = subprocess.run([self.warpool, *arguments], capture_output=True, text=True)
        holds(done.returncode in (0, 2), done.stderr)
        return [json.loads(line) for line in done.stdout.splitlines()]

    def write(self, name, content):
        path = os.path.join(self.folder, name)
        with open(path, "wb") as file:
            file.write(content)
        return path


def named(folder, *ends):
    return sorted(os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(ends))


def without_path(objects):
    return [{**it, "file": os.path.basename(it["file"])} for it in objects]


def objects(file):
    """The objects of a file's devices; none if it was refused."""
    return [device["object"] for device in file.get("devices", [])]


@check
def every_recording_has_the_answer_of_the_command(context):
    paths = named(RECORDINGS, ".pickle.xz")
    holds(len(paths) > 30, "there are recordings")
    expected = {}
    for it in without_path(context.run("explain", *paths, "--json")):
        expected.setdefault(it["file"], []).append(it)
    page = context.open()
    for path in paths:
        name = os.path.basename(path)
        [file] = page.choose(path)["files"]
        equal(objects(file), expected[name], name)
        shown = page.evaluate("""[...document.querySelectorAll(".headline")].map((it) => it.textContent)""")
        several = len(expected[name]) > 1
        headline = [f"{name}{', GPU %d' % it['device'] if several else ''}: {it['headline']}" for it in expected[name]]
        equal(shown, headline, name)
        verdicts = page.evaluate("""[...document.querySelectorAll(".device")].map((it) => it.dataset.verdict)""")
        equal(verdicts, [it["verdict"] for it in expected[name]], name)
    equal(page.problems(), [], "problems")
    page.close()


@check
def every_format_is_read(context):
    paths = named(DATA, ".pickle", ".gz", ".xz", ".zst", ".bz2", ".zip", ".pt", ".csv")
    holds(len(paths) > 15, "there are formats")
    page = context.open()
    found = page.choose(*paths)["files"]
    expected = without_path(context.run("explain", *paths, "--json"))
    equal([it for file in found for it in objects(file)], expected, "formats")
    refused = {file["file"] for file in found if "error" in file}
    equal(refused, {os.path.basename(path) for path in paths} - {it["file"] for it in expected}, "what is refused")
    for kind in ["pickle", "pickle.gz", "pickle.xz", "pickle.zst", "pickle.bz2", "zip"]:
        name = f"snapshot.{kind}" if kind != "pickle" else "snapshot.p4.pickle"
        holds(name not in refused, f"{name} is read")
    equal(page.problems(), [], "problems")
    page.close()


@check
def files_can_be_dropped(context):
    page = context.open()
    path = os.path.join(RECORDINGS, "verdict.limit.pickle.xz")
    data = {"items": [], "files": [os.path.abspath(path)], "dragOperationsMask": 1}

    def drop():
        for kind in ["dragEnter", "dragOver", "drop"]:
            page.call("Input.dispatchDragEvent", type=kind, x=200, y=200, data=data)

    equal(page.ask(drop), "answered", "the drop")
    [expected] = without_path(context.run("explain", path, "--json"))
    equal(objects(page.evaluate("warpool.answer.files[0]")), [expected], "the answer")
    equal(page.evaluate("location.href"), context.server.address, "the browser stays on the page")
    page.close()


@check
def gpu_can_be_chosen(context):
    page = context.open()
    path = os.path.join(RECORDINGS, "resnet_train.native.pickle.xz")
    page.choose(path)

    def choose_gpu():
        page.evaluate("""(() => {
            const gpu = document.getElementById("gpu");
            gpu.value = "rtx3080-10gb";
            gpu.dispatchEvent(new Event("change"));
        })()""")

    equal(page.ask(choose_gpu), "answered", "the answer")
    expected = without_path(context.run("explain", path, "--gpu", "rtx3080-10gb", "--json"))
    equal(objects(page.evaluate("warpool.answer.files[0]")), expected, "the answer")
    page.close()


@check
def viewer_is_that_of_the_command(context):
    page = context.open()
    path = os.path.join(RECORDINGS, "verdict.growth.pickle.xz")
    page.choose(path)
    equal(page.ask(lambda: page.click_on("button.view")), "answered", page.text("#problem"))
    written = os.path.join(context.folder, "view.html")
    context.run("view", path, "-o", written, "--json")
    with open(written, encoding="utf-8") as file:
        expected = file.read()
    frame = page.frame()
    source = frame.evaluate("document.querySelector('#manifest').textContent")
    manifest = expected.split('id="manifest">', 1)[1].split("</script>", 1)[0]
    equal(json.loads(source), json.loads(manifest), "the data of the page")
    equal(frame.evaluate("globalThis.origin"), "null", "the frame has an origin of its own")
    equal(page.problems() + frame.problems(), [], "problems")
    page.close()


@check
def several_files_are_compared(context):
    page = context.open()
    names = ["verdict.limit", "verdict.growth", "verdict.other_pool", "verdict.other_stream"]
    paths = [os.path.join(RECORDINGS, f"{name}.pickle.xz") for name in names]
    ranks = page.choose(*paths)["ranks"]
    text = subprocess.run([context.warpool, "explain", *paths], capture_output=True, text=True, check=True).stdout
    words = " ".join(text.split())
    for sentence in [ranks["headline"], *ranks["sentences"]]:
        holds(" ".join(sentence.split()) in words, f"the command says: {sentence}")
    rows = [row[0] for row in ranks["tables"][-1]["rows"]]
    equal(rows, sorted(os.path.basename(path) for path in paths), "the files, by name")
    equal(page.ask(lambda: page.click_on("#compare")), "answered", page.text("#problem"))
    [expected] = context.run("diff", paths[0], paths[1], "--json")
    [found] = [device["object"] for device in page.evaluate("warpool.difference.devices")]
    for side in ["before", "after"]:
        expected[side]["file"] = os.path.basename(expected[side]["file"])
    equal(found, expected, "the difference")
    frame = page.frame()
    holds(frame.evaluate("document.getElementById('headline').textContent.length") > 0, "the page of the difference")
    equal(page.problems() + frame.problems(), [], "problems")
    page.close()


@check
def hostile_recordings_run_nothing(context):
    """Texts that are HTML stay texts, in the answer and in the viewer."""
    page = context.open()
    path = context.write(f"{snapshots.HTML.replace('/', '_')[:80]}.pickle", snapshots.named_like_html())
    [file] = page.choose(path)["files"]
    holds(snapshots.HTML in json.dumps(file).replace("\\\"", '"'), "the texts are in the answer")
    equal(page.ask(lambda: page.click_on("button.view")), "answered", page.text("#problem"))
    frame = page.frame()
    frame.evaluate("warpool.toPeak('peak_live')")
    frame.settle()
    for document in [page, frame]:
        equal(document.evaluate("typeof globalThis.executed"), "undefined", "nothing was executed")
        equal(document.evaluate("document.querySelectorAll('img').length"), 0, "there is no image")
        equal(document.problems(), [], "problems")
    page.close()


@check
def frame_can_do_nothing_but_draw(context):
    """The policy of the page holds in the viewer's frame."""
    page = context.open()
    page.choose(os.path.join(RECORDINGS, "verdict.limit.pickle.xz"))
    equal(page.ask(lambda: page.click_on("button.view")), "answered", page.text("#problem"))
    frame = page.frame()
    refused = frame.evaluate("""(async () => {
        const script = document.createElement("script");
        script.textContent = "globalThis.executed = true";
        document.body.append(script);
        const fetched = await fetch("https://example.org/").then(() => "fetched", () => "refused");
        let parent = "reached";
        try { globalThis.parent.document; } catch { parent = "refused"; }
        return [typeof globalThis.executed, fetched, parent];
    })()""")
    equal(refused, ["undefined", "refused", "refused"], "what the frame may do")
    page.close()


@check
def crafted_files_are_refused(context):
    """No file makes the page hang or fail; the reason is that of the command."""
    page = context.open()
    paths = []
    for name, content, _ in snapshots.crafted():
        paths.append(context.write(name, content))
    found = {file["file"]: file for file in page.choose(*paths)["files"]}
    for name, _, reason in snapshots.crafted():
        error = found[name].get("error", {})
        equal(error.get("kind"), "input", f"{name}: {error}")
        holds(reason in error["message"], f"{name}: {error['message']}")
    damaged = sorted(os.path.join(CORPUS, name) for name in os.listdir(CORPUS))
    for path in damaged:
        [file] = page.choose(path)["files"]
        expected = context.run("explain", path, "--json")
        equal(objects(file), without_path(expected), os.path.basename(path))
    equal(page.evaluate("typeof globalThis.executed"), "undefined", "nothing was executed")
    page.close()


@check
def example_works_offline(context):
    server = Server(context.server_folder)
    context.browser.own = (server.address, *context.browser.own)
    before, context.server = context.server, server
    page = context.open()
    context.server = before
    page.wait("document.documentElement.dataset.offline === 'ready'")
    server.stop()
    page.call("Page.reload")
    page.wait("document.documentElement?.dataset.state === 'idle'")
    equal(page.ask(lambda: page.click_on("#example")), "answered", page.text("#problem"))
    holds("out of memory" in page.text(".headline"), "the verdict")
    equal(page.ask(lambda: page.click_on("button.view")), "answered", page.text("#problem"))
    holds(page.frame().evaluate("document.title").startswith("example"), "the viewer")
    page.close()


def processor_seconds(process):
    """The processor time that a process and all below it have taken."""
    parents, times = {}, {}
    for number in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{number}/stat", encoding="utf-8") as file:
                fields = file.read().rsplit(")", 1)[1].split()
        except OSError:
            continue
        parents[int(number)] = int(fields[1])
        times[int(number)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def is_below(number):
        while number > 1 and number != process:
            number = parents.get(number, 0)
        return number == process

    return sum(seconds for number, seconds in times.items() if is_below(number))


def large_recording_is_answered_in_time(context):
    """Not one of the usual checks. Bounds: 15 s of one core, 1 GB."""
    path = os.path.join(context.folder, "large.pickle")
    events = snapshots.large(path, LARGE_BYTES)
    size = os.path.getsize(path)
    holds(abs(size - LARGE_BYTES) < LARGE_BYTES // 5, f"it has {size} bytes")
    page = context.open()
    before = processor_seconds(context.browser.process.pid)
    [file] = page.choose(path, seconds=600)["files"]
    seconds = processor_seconds(context.browser.process.pid) - before
    cost = page.evaluate("warpool.cost")
    print(f"      {size} bytes, {events} events: {cost['seconds']:.1f} s, {seconds:.1f} s of processor time, "
          f"{cost['memoryBytes'] / 1e6:.0f} MB")
    equal(objects(file), without_path(context.run("explain", path, "--json")), "the answer")
    holds(seconds < 15, f"{seconds:.1f} s of processor time")
    holds(cost["memoryBytes"] < 1e9, f"{cost['memoryBytes']} bytes of memory")
    page.close()


def main():
    arguments = sys.argv[1:]
    folder = os.path.join(ROOT, "target/web")
    checks = list(CHECKS)
    if "--page" in arguments:
        at = arguments.index("--page")
        folder = arguments[at + 1]
        del arguments[at:at + 2]
    if "--large" in arguments:
        arguments.remove("--large")
        checks.append(large_recording_is_answered_in_time)
    if not arguments:
        sys.exit(__doc__)
    warpool, *names = arguments
    failed = 0
    server = Server(folder)
    with tempfile.TemporaryDirectory() as made, Browser() as browser:
        context = Context(os.path.abspath(warpool), browser, server, made)
        context.server_folder = folder
        for function in checks:
            if names and function.__name__ not in names:
                continue
            begun = time.monotonic()
            try:
                function(context)
                print(f"ok    {function.__name__} ({time.monotonic() - begun:.1f} s)", flush=True)
            except (AssertionError, BrowserError, subprocess.CalledProcessError) as error:
                failed += 1
                detail = getattr(error, "stderr", None) or error
                print(f"FAIL  {function.__name__}: {str(detail)[:3000]}", flush=True)
    server.stop()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
