#!/usr/bin/env python3
"""Tests of the pages of `warpool view` and `warpool diff -o` in a real browser.

    run.py WARPOOL [--screenshots FOLDER] [--pictures FOLDER] [NAME...]

WARPOOL is the built command. Screenshots are to be looked at; pictures are those of the documentation (in docs). Each
check opens a page and uses it as a reader would: pointer, keys, search. The figures that it shows must be those of
`--json`, and those that an own count over the recording's events gives. """

import json
import os
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from devtools import Browser, BrowserError  # noqa: E402
from expect import equal, holds, size_text  # noqa: E402
import parts  # noqa: E402
import ranks  # noqa: E402

RECORDINGS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../../recordings")
CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


class Context:
    """The command, the browser, and the pages that were made."""

    def __init__(self, warpool, browser, folder):
        self.warpool, self.browser, self.folder, self.pages = warpool, browser, folder, {}

    def made(self, name):
        """The page of a recording, and the figures of its first device."""
        if name not in self.pages:
            page = os.path.join(self.folder, f"{name}.html")
            file = os.path.join(RECORDINGS, f"{name}.pickle.xz")
            self.pages[name] = page, self.run("view", file, "-o", page, "--json")[0]
        page, written = self.pages[name]
        return page, written["devices"][0]

    def run(self, *arguments):
        """The objects that a command prints."""
        done = subprocess.run([self.warpool, *arguments], capture_output=True, text=True, check=True)
        return [json.loads(line) for line in done.stdout.splitlines()]

    def open(self, name, **options):
        page, figures = self.made(name)
        return self.browser.open(page, **options), figures

    def changed(self, path, name, change):
        """A copy of a page, with `change(manifest)` applied to what its script is told."""
        with open(path, encoding="utf-8") as file:
            before, rest = file.read().split('id="manifest">', 1)
        text, after = rest.split("</script>", 1)
        manifest = json.loads(text)
        change(manifest)
        text = json.dumps(manifest).replace("<", "\\u003c")
        copy = os.path.join(self.folder, name)
        with open(copy, "w", encoding="utf-8") as file:
            file.write(f'{before}id="manifest">{text}</script>{after}')
        return copy

    def difference(self):
        """The page of two recordings, and what the command prints about them."""
        if "difference" not in self.pages:
            files = [os.path.join(RECORDINGS, f"{name}.pickle.xz") for name in ["verdict.limit", "verdict.growth"]]
            path = os.path.join(self.folder, "difference.html")
            self.pages["difference"] = path, self.run("diff", *files, "-o", path, "--json")[0]
        return self.pages["difference"]


def part_texts(page):
    """The parts that are shown at the cursor."""
    return page.evaluate("""Object.fromEntries([...document.querySelectorAll("#parts li")].map(
        (item) => [item.dataset.part, item.querySelector("b").innerText]))""")


def moment_texts(page):
    """The bytes of the moments that the reader can go to."""
    return page.evaluate("""Object.fromEntries([...document.querySelectorAll("#moments button")].map(
        (button) => [button.dataset.moment, button.querySelector(".value").innerText]))""")


def view(page, expression):
    return page.evaluate(f"warpool.view.{expression}")


def chart_x(page, unit):
    """The horizontal place of a unit of the axis in the chart."""
    return page.evaluate(f"warpool.view.x({unit}, document.getElementById('timeline').clientWidth)")


@check
def figures_are_those_of_the_json(context):
    for name in ["oom_stacks.fraction_6gib", "resnet_train.native", "prefetch_streams_train.expandable"]:
        page, figures = context.open(name)
        shown = page.evaluate("""Object.fromEntries([...document.querySelectorAll("#figures dd")].map(
            (data) => [data.dataset.figure, data.firstChild.textContent]))""")
        moments = moment_texts(page)
        equal(moments["most-allocated"], size_text(figures["peak_live"]["live_bytes"]), "most allocated")
        equal(moments["most-reserved"], size_text(figures["peak_reserved"]["reserved_bytes"]), "most reserved")
        equal("out-of-memory" in moments, figures["ooms"] > 0, "there is a button if there is an event")
        for key in ["events", "allocations", "retries"]:
            equal(shown[key], f"{figures[key]:,}", key)
        equal(shown["out-of-memory"], str(figures["ooms"]), "out of memory")
        for peak in ["peak_live", "peak_reserved"]:
            page.evaluate(f"warpool.toPeak('{peak}')")
            page.settle()
            expected = {part: size_text(size) for part, size in figures[peak]["parts"].items()}
            expected["reserved"] = size_text(figures[peak]["reserved_bytes"])
            expected["live"] = size_text(figures[peak]["live_bytes"])
            equal(part_texts(page), expected, f"{name}: parts at {peak}")
        equal(page.problems(), [], "problems")
        page.close()


@check
def state_at_any_position_is_consistent(context):
    """What the script makes of allocations and ranges adds up to what was counted when the page was made."""
    for name in ["oom_stacks.fraction_6gib", "churn.expandable_cap", "ring.late_native", "graphs.expandable"]:
        page, _ = context.open(name)
        wrong = page.evaluate("""(() => {
            const { recording } = warpool.view;
            const { allocations, ranges } = recording;
            const wrong = [];
            for (let step = 0; step <= 60; step++) {
                const position = Math.round((recording.events * step) / 60);
                const sample = recording.sampleAt(position);
                const sum = { allocated: 0, rounding: 0, waiting: 0, reserved: 0 };
                for (const at of recording.activeAt(position)) {
                    if (allocations.waits[at] <= position) sum.waiting += allocations.bytes[at];
                    else {
                        sum.allocated += allocations.requested[at];
                        sum.rounding += allocations.bytes[at] - allocations.requested[at];
                    }
                }
                for (const at of recording.rangesAt(position)) sum.reserved += ranges.bytes[at];
                for (const [part, bytes] of Object.entries(sum)) {
                    if (bytes !== sample[part]) wrong.push([position, part, bytes, sample[part]]);
                }
            }
            return wrong;
        })()""")
        equal(wrong, [], name)
        page.close()


@check
def holders_are_those_of_explain(context):
    name = "oom_stacks.fraction_6gib"
    page, _ = context.open(name)
    explained = context.run("explain", os.path.join(RECORDINGS, f"{name}.pickle.xz"), "--no-fits", "--json")[0]
    # The page opens at the moment that is explained.
    equal(view(page, "cursor"), explained["moment"]["event"] + 1, "the cursor")
    rows = page.evaluate("""[...document.querySelectorAll("#holders tbody tr")].map((row) =>
        [row.querySelector(".call").innerText, row.cells[1].innerText, Number(row.cells[3].innerText)])""")
    for holder, row in zip(explained["holders"][:20], rows):
        equal(row, [holder["name"], size_text(holder["bytes"]), holder["count"]], "a row")
    holds(len(rows) >= 20, f"{len(rows)} rows")
    page.close()


@check
def pointer_sets_the_cursor_and_zooms(context):
    page, figures = context.open("oom_stacks.fraction_6gib")
    box = page.box("#timeline")
    equal(view(page, "axis"), "events", "most of its events are at the end, so it is drawn by event")
    page.key("x")
    x = chart_x(page, figures["peak_live"]["time_us"])
    page.click(box["left"] + x, box["top"] + 100)
    near = abs(view(page, "recording.timeOf(warpool.view.cursor)") - figures["peak_live"]["time_us"])
    holds(near < figures["duration_us"] / 100, f"a click sets the cursor, {near} us away")
    holds("event" in page.text("#moment"), page.text("#moment"))
    # A brush zooms; a double click shows all.
    page.drag([(box["left"] + x, box["top"] + 80) for x in [300, 400, 500]])
    shown = view(page, "to") - view(page, "from")
    whole = figures["duration_us"]
    expected = whole * 200 / (box["width"] - 66 - 12)
    holds(abs(shown - expected) < whole / 200, f"{shown} us are shown instead of {expected}")
    # Ctrl and the wheel zoom around the pointer.
    before = view(page, f"unitAt({400}, {box['width']})")
    page.mouse("mouseWheel", box["left"] + 400, box["top"] + 80, deltaX=0, deltaY=-200, modifiers=2)
    page.settle()
    page.wait(f"warpool.view.to - warpool.view.from < {shown * 0.6}")
    after = view(page, f"unitAt({400}, {box['width']})")
    holds(abs(before - after) < shown / 100, f"the place under the pointer moved from {before} to {after}")
    page.evaluate("warpool.view.reset()")
    # The overview: a new range, then its edge.
    box = page.box("#overview")
    y = box["top"] + 20
    page.drag([(box["left"] + 200, y), (box["left"] + 300, y), (box["left"] + 420, y)])
    holds(view(page, "to") < whole * 0.6, "a range is brushed in the overview")
    width = view(page, "to") - view(page, "from")
    page.drag([(box["left"] + 320, y), (box["left"] + 360, y), (box["left"] + 380, y)])
    holds(abs(view(page, "to") - view(page, "from") - width) < 1, "dragging the range moves it")
    equal(page.problems(), [], "problems")
    page.close()


@check
def deep_zoom_shows_single_events(context):
    page, figures = context.open("resnet_train.native")
    axis = page.text("#axis")
    page.key("x")
    holds(page.text("#axis") != axis, "x changes the axis")
    page.evaluate("warpool.view.axis === 'events' || warpool.view.toggleAxis()")
    page.key("p")
    for _ in range(20):
        page.key("+")
    holds(view(page, "to") - view(page, "from") <= 8, "a few events fill the chart")
    position = view(page, "cursor")
    for _ in range(5):
        page.key("ArrowRight")
    equal(view(page, "cursor"), position + 5, "the cursor moves by events")
    page.key("0")
    equal([view(page, "from"), view(page, "to")], [0, figures["events"]], "all is shown again")
    page.close()


@check
def keys_work(context):
    page, figures = context.open("oom_stacks.fraction_6gib")
    page.key("p")
    equal(view(page, "cursor"), figures["peak_live"]["position"], "p")
    page.key("r")
    equal(view(page, "cursor"), figures["peak_reserved"]["position"], "r")
    page.key("o")
    equal(view(page, "cursor"), figures["moment"]["event"] + 1, "o")
    holds("out of memory" in page.text("#moment"), page.text("#moment"))
    page.key("Home")
    equal(view(page, "cursor"), 0, "Home")
    page.key("y")
    holds(page.text("#moment").find("event") > 0 and view(page, "cursor") > 0, "y goes to the first retry")
    for colour in ["category", "age"]:
        page.key("a")
        equal(page.text("#colour"), f"coloured by {colour}", "a")
    frames = page.evaluate("warpool.flame.graph.places.length")
    page.key("End")
    page.key("o")
    page.key("f")
    holds(page.evaluate("document.getElementById('frames').getAttribute('aria-pressed')") == "true", "f")
    holds(frames >= 0, "the flame graph is drawn")
    page.key("?")
    holds(page.evaluate("document.getElementById('keys').open"), "? opens the list of keys")
    page.key("Escape")
    page.evaluate("document.getElementById('keys').close()")
    equal(page.problems(), [], "problems")
    page.close()


@check
def search_finds_frames(context):
    page, _ = context.open("oom_stacks.fraction_6gib")
    page.key("/")
    page.type("dropout")
    page.settle()
    explained = context.run(
        "explain", os.path.join(RECORDINGS, "oom_stacks.fraction_6gib.pickle.xz"), "--no-fits", "--json")[0]
    wanted = [holder for holder in explained["holders"] if "dropout" in f"{holder['name']} {holder['path']}".lower()]
    size = sum(holder["bytes"] for holder in wanted)
    count = sum(holder["count"] for holder in wanted)
    holds(count >= 24, "the recording has dropout in it")
    equal(page.text("#found"), f"{size_text(size)} in {count} blocks", "what is found at the cursor")
    holds(view(page, "cursor") > 0, "typing does not move the cursor")
    page.key("Escape")
    equal(page.text("#found"), "", "Escape ends the search")
    page.key("/")
    page.type("zzqq")
    equal(page.text("#found"), "nothing found", "nothing")
    equal(page.problems(), [], "problems")
    page.close()


def pixels(page, selector):
    """How many different colours a canvas has, and its most frequent one."""
    return page.evaluate(f"""(() => {{
        const canvas = document.querySelector({json.dumps(selector)});
        const {{ data }} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        const counts = new Map();
        for (let at = 0; at < data.length; at += 4) {{
            const colour = [data[at], data[at + 1], data[at + 2], data[at + 3]].join(" ");
            counts.set(colour, (counts.get(colour) ?? 0) + 1);
        }}
        return {{ colours: counts.size, most: [...counts].sort((a, b) => b[1] - a[1])[0][0] }};
    }})()""")


@check
def everything_is_drawn_in_both_themes(context):
    page, _ = context.open("oom_stacks.fraction_6gib")
    canvases = ["#overview", "#timeline .base", "#timeline .over", "#bands .base", "#map", "#flame"]
    light = {}
    for canvas in canvases:
        light[canvas] = pixels(page, canvas)
        holds(light[canvas]["colours"] >= 3, f"{canvas} has {light[canvas]['colours']} colours")
    background = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(background)
    page.key("t")
    holds(page.evaluate(background) != before, "t changes the theme")
    for canvas in ["#timeline .base", "#map", "#flame"]:
        holds(pixels(page, canvas) != light[canvas], f"{canvas} follows the theme")
    page.key("t")
    equal(page.evaluate(background), before, "and back")
    dark, _ = context.open("oom_stacks.fraction_6gib", dark=True)
    holds(dark.evaluate(background) != before, "the system's theme counts")
    dark.close()
    page.close()


@check
def narrow_window_has_no_sideways_scroll(context):
    for name in ["oom_stacks.fraction_6gib", "verdict.growth"]:
        for width in [390, 480]:
            page, _ = context.open(name, width=width, height=800)
            overflow = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            holds(overflow <= 0, f"{name}: {overflow} pixels too wide")
            equal(page.problems(), [], "problems")
            page.close()


@check
def odd_recordings_open(context):
    """Without stacks, private pools, several streams, growth, tiny ones: all open without problems."""
    for name in ["mempool.native", "pools.native", "streams.expandable_cap", "verdict.outside", "device_full.native"]:
        page, figures = context.open(name)
        holds(not page.evaluate("document.querySelector('.failure')"), f"{name} fails")
        shown = page.evaluate("document.querySelector('#figures dd[data-figure=events]').firstChild.textContent")
        equal(shown, f"{figures['events']:,}", name)
        equal(page.problems(), [], name)
        page.close()


@check
def difference_is_that_of_the_json(context):
    path, expected = context.difference()
    page = context.browser.open(path)
    changed = [change for change in expected["changes"] if change["kind"] != "same"]
    rows = page.evaluate("""[...document.querySelectorAll("#changes tbody tr")].map((row) =>
        [row.querySelector(".call").innerText, ...[1, 2, 3].map((at) => row.cells[at].innerText)])""")
    expected = [[it["name"], it["kind"], *[size_text(it[f"bytes_{side}"]) for side in ["before", "after"]]]
                for it in changed]
    equal(rows, expected, "the rows")
    page.evaluate("[...document.querySelectorAll('#kinds button')].find((it) => it.innerText === 'new').click()")
    kinds = page.evaluate("[...document.querySelectorAll('#changes tbody tr')].map((row) => row.cells[1].innerText)")
    holds("new" not in kinds and kinds, f"a kind is filtered: {kinds}")
    for canvas in ["#before", "#after", "#flame"]:
        holds(pixels(page, canvas)["colours"] >= 3, f"{canvas} is drawn")
    page.key("/")
    page.type("losses")
    holds(" of " in page.text("#found"), page.text("#found"))
    equal(page.problems(), [], "problems")
    page.close()


@check
def script_in_a_recording_stays_text(context):
    """A file name that looks like markup is shown as it is."""
    path = os.path.join(context.folder, "<img src=x onerror=alert(1)>&amp;.pickle.xz")
    with open(os.path.join(RECORDINGS, "verdict.limit.pickle.xz"), "rb") as source, open(path, "wb") as copy:
        copy.write(source.read())
    out = os.path.join(context.folder, "odd.html")
    context.run("view", path, "-o", out, "--json")
    page = context.browser.open(out)
    equal(page.text("#title"), os.path.basename(path), "the title")
    equal(page.evaluate("document.images.length"), 0, "images")
    equal(page.problems(), [], "problems")
    page.close()


CHECKS.extend(parts.CHECKS)
CHECKS.extend(ranks.CHECKS)


def screenshots(context, folder):
    """Pictures to look at: light, dark, narrow, the search, and the difference."""
    os.makedirs(folder, exist_ok=True)

    def whole(page, name, width, keys=(), search=None):
        for key in keys:
            page.key(key)
        if search:
            page.evaluate(f"warpool.search({json.dumps(search)})")
        page.resize(width, page.evaluate("document.documentElement.scrollHeight"))
        page.settle()
        page.screenshot(os.path.join(folder, f"{name}.png"))
        page.close()

    for name in ["oom_stacks.fraction_6gib", "resnet_train.native", "graphs.expandable", "verdict.growth"]:
        for theme in ["light", "dark"]:
            whole(context.open(name, dark=theme == "dark")[0], f"{name}.{theme}", 1280)
    whole(context.open("oom_stacks.fraction_6gib", width=390)[0], "narrow", 390)
    whole(context.open("oom_stacks.fraction_6gib")[0], "search", 1280, keys="+++", search="dropout")
    whole(context.open("oom_stacks.fraction_6gib", dark=True)[0], "age", 1280, keys="aax")
    path, _ = context.difference()
    for theme in ["light", "dark"]:
        whole(context.browser.open(path, dark=theme == "dark"), f"difference.{theme}", 1280)
    whole(context.browser.open(path, width=480), "difference.narrow", 480)
    for theme, width in [("light", 1400), ("dark", 1400), ("light", 480), ("dark", 480)]:
        page, _ = context.open("train.default", width=width, dark=theme == "dark")
        page.evaluate("document.querySelector('#holders tbody tr').click()")
        whole(page, f"categories.{theme}.{width}", width, keys="as")


def pictures(context, folder):
    """The pictures of the documentation: parts of pages."""

    def part(page, name, first, last):
        page.resize(1100, page.evaluate("document.documentElement.scrollHeight"))
        page.settle()
        clip = page.evaluate(f"""(() => {{
            const boxes = ["{first}", "{last}"].map((it) => document.querySelector(it).getBoundingClientRect());
            const y = boxes[0].top + scrollY;
            return {{ x: boxes[0].left, y, width: boxes[0].width, height: boxes[1].bottom + scrollY - y }};
        }})()""")
        page.screenshot(os.path.join(folder, f"{name}.png"), clip)

    page, _ = context.open("oom_stacks.fraction_6gib", width=1100)
    part(page, "view-timeline", "section:nth-of-type(2)", "section:nth-of-type(2)")
    part(page, "view-cursor", "section:nth-of-type(3)", "section:nth-of-type(3)")
    page.close()
    page = context.browser.open(context.difference()[0], width=1100)
    part(page, "view-difference", "section:nth-of-type(2)", "section:last-of-type")
    page.close()


def main():
    arguments = sys.argv[1:]

    def folder_of(option):
        if option not in arguments:
            return None
        at = arguments.index(option)
        folder = arguments[at + 1]
        del arguments[at:at + 2]
        return folder

    screenshots_folder, pictures_folder = folder_of("--screenshots"), folder_of("--pictures")
    if not arguments:
        sys.exit(__doc__)
    warpool, *names = arguments
    failed = 0
    with tempfile.TemporaryDirectory() as pages, Browser() as browser:
        context = Context(os.path.abspath(warpool), browser, pages)
        for function in CHECKS:
            if names and function.__name__ not in names:
                continue
            try:
                function(context)
                print(f"ok    {function.__name__}", flush=True)
            except (AssertionError, BrowserError, subprocess.CalledProcessError) as error:
                failed += 1
                detail = getattr(error, "stderr", None) or error
                print(f"FAIL  {function.__name__}: {detail}", flush=True)
        if screenshots_folder:
            screenshots(context, screenshots_folder)
        if pictures_folder:
            pictures(context, pictures_folder)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
