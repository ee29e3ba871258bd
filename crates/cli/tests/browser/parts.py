"""Checks of the parts of a page that stand for themselves: moments, advice, categories, regions, the list of events,
the pinned stack; at two widths, in both themes."""

from expect import equal, holds, size_text

CHECKS = []
TRAINING = "oom_stacks.fraction_6gib"
# As PyTorch records by default: the kinds of all memory are known.
CATEGORIES = "train.default"
# Without call stacks no kind is.
UNKNOWN = "device_full.native"
SIZES = [(1400, False), (1400, True), (480, False), (480, True)]


def check(function):
    CHECKS.append(function)
    return function


def view(page, expression):
    return page.evaluate(f"warpool.view.{expression}")


def stub_clipboard(page):
    page.evaluate("""Object.defineProperty(navigator, "clipboard", { configurable: true, value: {
        writeText: async (text) => { globalThis.copied = text; } } })""")


def click(page, selector):
    """A click in the middle of an element, as a pointer makes it."""
    box = page.box(selector)
    page.click(box["left"] + box["width"] / 2, box["top"] + box["height"] / 2)


def show_events(page):
    """The list is made when it comes near the window."""
    page.box("#events")
    page.wait("warpool.events.isRevealed")
    page.settle()


def centre(page, places, selector):
    """The window's place of something on a canvas: `places` is an expression for {x, y} within it."""
    box = page.box(selector)
    at = page.evaluate(places)
    return box["left"] + at["x"], box["top"] + at["y"]


@check
def moments_move_the_cursor(context):
    page, figures = context.open(TRAINING)
    expected = {
        "most-allocated": figures["peak_live"]["position"],
        "most-reserved": figures["peak_reserved"]["position"],
        "out-of-memory": figures["moment"]["event"] + 1,
    }
    for name, position in expected.items():
        view(page, "moveCursor(0)")
        click(page, f"#moments [data-moment={name}]")
        equal(view(page, "cursor"), position, name)
        pressed = page.evaluate(f"document.querySelector('[data-moment={name}]').getAttribute('aria-pressed')")
        equal(pressed, "true", f"{name} is shown as chosen")
    peak = figures["peak_live"]["parts"]
    text = page.text("#moments [data-moment=most-allocated]")
    for part in ["allocated", "rounding"]:
        holds(size_text(peak[part]) in text, f"{part} of the most allocated: {text}")
    holds("requested + rounding" in text, "it says which bytes it counts")
    page.close()


@check
def advice_is_listed_and_copied(context):
    advice = [
        {"title": "Set expandable_segments:True", "detail": "Replayed: fits.", "fits": True, "bytes_saved": None,
         "apply": "export PYTORCH_ALLOC_CONF=expandable_segments:True <b>", "margin_bytes": 512 << 20},
        {"title": "Keep fewer losses", "detail": "", "apply": None, "fits": None, "bytes_saved": 3 << 30,
         "margin_bytes": None},
        {"title": "A smaller batch", "detail": "x" * 300, "apply": None, "fits": False, "bytes_saved": None,
         "margin_bytes": None},
    ]
    path, _ = context.made(TRAINING)

    def set_advice(manifest):
        manifest["devices"][0]["advice"] = advice

    copy = context.changed(path, "advice.html", set_advice)
    for width, dark in SIZES:
        page = context.browser.open(copy, width=width, dark=dark)
        stub_clipboard(page)
        texts = page.evaluate("[...document.querySelectorAll('#advice-list li')].map((item) => item.innerText)")
        equal(len(texts), 3, "items")
        for text, words in zip(texts, [["fits", "512 MiB to spare"], ["saves 3 GiB"], ["does not fit"]]):
            for word in words:
                holds(word in text, f"{word} in {text}")
        equal(page.evaluate("document.querySelectorAll('#advice-list button').length"), 1, "what can be copied")
        click(page, "#advice-list button")
        equal(page.evaluate("globalThis.copied"), advice[0]["apply"], "the copy")
        equal(page.text("#advice-list button"), "Copied", "the button says so")
        fits_in_the_window(page)
        equal(page.problems(), [], "problems")
        page.close()

    def no_advice(manifest):
        manifest["devices"][0]["advice"] = []

    page = context.browser.open(context.changed(path, "no_advice.html", no_advice))
    holds(page.evaluate("document.getElementById('advice').hidden"), "nothing is shown without advice")
    page.close()


def fits_in_the_window(page):
    """Nothing is too wide, controls do not lie over each other, and texts have contrast."""
    overflow = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    holds(overflow <= 0, f"{overflow} pixels too wide")
    overlaps = page.evaluate("""(() => {
        const visible = (it) => it.getClientRects().length > 0;
        const scrolled = (it) => it.closest(".scroll, #tooltip, dialog");
        const controls = [...document.querySelectorAll("main button, main select, main input, header button")]
            .filter((it) => visible(it) && !scrolled(it) && !it.closest("#pin"));
        const found = [];
        controls.forEach((one, at) => {
            const a = one.getBoundingClientRect();
            if (a.left < -0.5 || a.right > innerWidth + 0.5) found.push(`${one.id || one.innerText} leaves the window`);
            for (const other of controls.slice(at + 1)) {
                // The header stays while others scroll.
                if (one.closest("header") !== other.closest("header")) continue;
                const b = other.getBoundingClientRect();
                if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1) {
                    found.push(`${one.id || one.innerText} and ${other.id || other.innerText}`);
                }
            }
        });
        return found;
    })()""")
    equal(overlaps, [], "controls that overlap or leave the window")
    faint = page.evaluate("""(() => {
        const parse = (text) => text.match(/[\\d.]+/g).map(Number);
        const luminance = ([r, g, b]) => [r, g, b].map((it) => it / 255)
            .map((it) => (it <= 0.03928 ? it / 12.92 : ((it + 0.055) / 1.055) ** 2.4))
            .reduce((sum, it, at) => sum + it * [0.2126, 0.7152, 0.0722][at], 0);
        const backgroundOf = (element) => {
            for (let at = element; at; at = at.parentElement) {
                const colour = parse(getComputedStyle(at).backgroundColor);
                if (colour.length === 3 || colour[3] > 0) return colour;
            }
            return [255, 255, 255];
        };
        const found = new Set();
        const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
        while (walker.nextNode()) {
            const element = walker.currentNode.parentElement;
            if (!walker.currentNode.data.trim() || element.getClientRects().length === 0) continue;
            if (element.closest("button:disabled, script, template")) continue;
            const [a, b] = [parse(getComputedStyle(element).color), backgroundOf(element)].map(luminance);
            const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
            if (contrast < 4.5) found.add(`${walker.currentNode.data.trim().slice(0, 30)} ${contrast.toFixed(2)}`);
        }
        return [...found];
    })()""")
    equal(faint, [], "texts with little contrast")


@check
def pages_fit_at_both_widths_in_both_themes(context):
    for width, dark in SIZES:
        page, _ = context.open(CATEGORIES, width=width, dark=dark)
        page.key("s")
        page.key("a")
        fits_in_the_window(page)
        page.evaluate("document.querySelector('#holders tbody tr').click()")
        page.settle()
        fits_in_the_window(page)
        box = page.evaluate("""(() => {
            const { left, right, bottom } = document.getElementById("pin").getBoundingClientRect();
            return { left, right, bottom };
        })()""")
        holds(box["left"] >= 0 and box["right"] <= width and box["bottom"] <= 900, f"the panel is in the window: {box}")
        equal(page.problems(), [], "problems")
        page.close()
        page = context.browser.open(with_category_changes(context), width=width, dark=dark)
        fits_in_the_window(page)
        cut = page.evaluate("""[...document.querySelectorAll(".scroll")].filter(
            (it) => it.scrollWidth > it.clientWidth + 1).length""")
        equal(cut, 0, "tables that are cut")
        equal(page.problems(), [], "problems")
        page.close()


@check
def categories_add_up(context):
    """At every position the categories add up to what was requested, in the samples and in the blocks."""
    for name in [CATEGORIES, "leak.default", TRAINING]:
        page, _ = context.open(name)
        holds(view(page, "recording.hasCategories"), name)
        wrong = page.evaluate("""(() => {
            const { recording } = warpool.view;
            const { allocations, levels } = recording;
            const wrong = [];
            for (const level of levels) {
                for (let at = 0; at < level.count; at++) {
                    const sum = level.categories.reduce((total, category) => total + category[at], 0);
                    if (sum !== level.allocated[at]) wrong.push([level.positions, at, sum, level.allocated[at]]);
                }
            }
            for (let step = 0; step <= 20; step++) {
                const position = Math.round((recording.events * step) / 20);
                const sums = recording.categories.map(() => 0);
                for (const at of recording.activeAt(position)) {
                    if (allocations.waits[at] > position) sums[allocations.category[at]] += allocations.requested[at];
                }
                sums.forEach((sum, category) => {
                    const sample = levels[0].categories[category][position];
                    if (sum !== sample) wrong.push([position, category, sum, sample]);
                });
            }
            return wrong.slice(0, 5);
        })()""")
        equal(wrong, [], name)
        page.close()


@check
def categories_are_shown(context):
    page, _ = context.open(UNKNOWN)
    for hidden in ["layers", "bands-colour", "categories"]:
        holds(page.evaluate(f"document.getElementById('{hidden}').hidden"), f"{hidden}: no categories are known")
    page.key("s")
    equal(view(page, "stackBy"), "part", "there is no other choice")
    page.close()
    page, _ = context.open(CATEGORIES)
    shown = page.evaluate("""Object.fromEntries([...document.querySelectorAll("#categories li[data-part]")].map(
        (item) => [item.dataset.part, item.querySelector("b").innerText]))""")
    expected = page.evaluate("""(() => {
        const { recording, cursor } = warpool.view;
        const { allocations } = recording;
        const sums = Object.fromEntries(recording.categories.map(({ name }) => [name, 0]));
        for (const at of recording.activeAt(cursor)) {
            if (allocations.waits[at] <= cursor) continue;
            sums[recording.categories[allocations.category[at]].name] += allocations.requested[at];
        }
        return sums;
    })()""")
    equal(shown, {name: size_text(size) for name, size in expected.items()}, "bytes at the cursor")
    chart = "document.querySelector('#timeline .base').toDataURL()"
    drawings = {name: f"document.querySelector('{name}').toDataURL()" for name in ["#map", "#bands .base", "#flame"]}
    before = page.evaluate(chart)
    click(page, "#layers")
    holds(page.evaluate(chart) != before, "the chart is stacked by category")
    holds("activations" in page.text("#legend"), page.text("#legend"))
    was = {name: page.evaluate(picture) for name, picture in drawings.items()}
    click(page, "#colour")
    equal(page.text("#colour"), "coloured by category", "the colour")
    for name, picture in drawings.items():
        holds(page.evaluate(picture) != was[name], f"{name} is coloured by category")
    page.wait("location.hash.includes('colour=category') && location.hash.includes('layers=category')")
    equal(page.problems(), [], "problems")
    page.close()


@check
def choices_are_in_the_address(context):
    path, figures = context.made(TRAINING)
    page = context.browser.open(f"{path}#at=1234&colour=age&axis=time")
    equal([view(page, "cursor"), view(page, "colourBy"), view(page, "axis")], [1234, "age", "time"], "the choices")
    page.key("p")
    page.wait(f"location.hash.includes('at={figures['peak_live']['position']}&')")
    page.close()
    page = context.browser.open(f"{path}#at=x&colour=%00&layers=nothing&device=9")
    equal([view(page, "colourBy"), view(page, "stackBy")], ["stack", "part"], "nonsense changes nothing")
    equal(page.problems(), [], "problems")
    page.close()


@check
def regions_are_drawn_and_zoomed_to(context):
    for width, dark in SIZES:
        page, figures = context.open(TRAINING, width=width, dark=dark)
        count = view(page, "recording.regions.count")
        holds(count > 20, f"{count} regions")
        names = page.evaluate("(() => { const { regions } = warpool.view.recording; return [...new Set(Array.from("
                              "{ length: regions.count }, (_, at) => regions.nameOf(at)))]; })()")
        holds(any("Optimizer.step" in name for name in names), f"{names}")
        # The events of a region are within it, by time and by position.
        wrong = page.evaluate("""(() => {
            const { recording } = warpool.view;
            const { regions } = recording;
            const wrong = [];
            for (let at = 0; at < regions.count; at++) {
                const [from, until] = [regions.from[at], regions.until[at]];
                if (until > from && recording.timeOf(from + 1) < regions.fromTime[at]) wrong.push([at, "start"]);
                if (until > from && recording.timeOf(until) > regions.untilTime[at]) wrong.push([at, "end"]);
            }
            return wrong;
        })()""")
        equal(wrong, [], "events of regions")
        cursor = view(page, "cursor")
        page.click(*centre(page, """(() => {
            const { regions } = warpool.view.recording;
            const place = warpool.regions.places.find(({ at }) => regions.nameOf(at).includes("step"));
            return { x: place.x + place.size / 2, y: place.y + 6 };
        })()""", "#regions"))
        chosen = page.evaluate("warpool.regions.chosen")
        from_, until = view(page, f"recording.regions.from[{chosen}]"), view(page, f"recording.regions.until[{chosen}]")
        shown = [view(page, "from"), view(page, "to")]
        holds(shown[0] <= from_ and until <= shown[1], f"{from_}..{until} is shown in {shown}")
        holds(shown[1] - shown[0] < 1.3 * (until - from_) + 8, f"it fills the chart: {shown}")
        equal(view(page, "cursor"), cursor, "the cursor stays")
        holds("events" in page.text("#regions-note"), page.text("#regions-note"))
        # The arrows go on to the next one, with the cursor.
        page.evaluate("document.getElementById('regions').focus()")
        page.key("ArrowRight")
        equal(page.evaluate("warpool.regions.chosen"), chosen + 1, "the next")
        equal(view(page, "cursor"), view(page, f"recording.regions.from[{chosen + 1}]"), "its start")
        page.key("Enter")
        holds(view(page, "from") <= view(page, "cursor") <= view(page, "to"), "Enter zooms to it")
        equal(page.problems(), [], "problems")
        page.close()
    page, _ = context.open("churn.expandable_cap")
    holds(page.evaluate("document.querySelector('.regions').hidden"), "without regions there is no strip")
    page.close()


@check
def thousands_of_regions_are_drawn_fast(context):
    page, _ = context.open(TRAINING)
    milliseconds = page.evaluate("""(() => {
        const { view, regions: strip } = warpool;
        const count = 60_000;
        const { events } = view.recording;
        const from = Float64Array.from({ length: count }, (_, at) => (at * events) / count);
        const until = from.map((start) => start + events / count);
        Object.assign(view.recording.regions, {
            count, from, until, fromTime: from, untilTime: until, row: new Uint8Array(count), rows: 1,
            nameOf: (at) => `step ${at}`, hasStart: () => true, hasEnd: (at) => at % 2 === 0,
        });
        strip.open();
        const start = performance.now();
        for (let step = 0; step < 10; step++) strip.surface.drawNow();
        return (performance.now() - start) / 10;
    })()""")
    places = page.evaluate("warpool.regions.places.length")
    holds(300 < places < 2000, f"{places} of 60000 regions are drawn, about one in a pixel")
    holds(milliseconds < 100, f"drawing takes {milliseconds} ms")
    page.evaluate("warpool.regions.zoomTo(30_001)")
    page.settle()
    holds(page.evaluate("warpool.regions.places.some(({ at }) => at === 30_001)"), "the one that is zoomed to is drawn")
    holds(page.evaluate("warpool.regions.lines(30_001).includes('its end is not recorded')"), "it says what is missing")
    equal(page.problems(), [], "problems")
    page.close()


@check
def texts_of_the_program_are_shown(context):
    """What the program set as metadata is in the tooltip, the panel and the list, from the event on that has it."""
    page, _ = context.open(TRAINING)
    page.evaluate("""(() => {
        const { recording } = warpool.view;
        recording.contexts = {
            position: [100, 200, 300],
            metadata: [1, 0, 2],
            compiled: [0, 0, 3],
            texts: ["epoch <b>1</b>", "epoch 2", "0/1"],
        };
    })()""")
    lines = page.evaluate("[99, 100, 199, 200, 250, 300, 9999].map((at) => warpool.view.recording.contextLines(at))")
    first, last = ["metadata: epoch <b>1</b>"], ["metadata: epoch 2", "compiled region: 0/1"]
    equal(lines, [[], first, first, [], [], last, last], "the texts by position")
    page.evaluate("document.querySelector('#holders tbody tr').click()")
    page.evaluate("warpool.bands.onPin(warpool.view.recording.allocations.from.findIndex((from) => from >= 100))")
    page.settle()
    holds("epoch <b>1</b>" in page.text("#pin-facts"), page.text("#pin-facts"))
    view(page, "moveCursor(150)")
    show_events(page)
    title = page.evaluate("document.querySelector('#events [aria-selected=true] td:last-child').title")
    holds("metadata: epoch <b>1</b>" in title, title)
    equal(page.problems(), [], "problems")
    page.close()


@check
def events_are_those_of_the_recording(context):
    """Every event that changes something is in the list, once, in order."""
    for name in [TRAINING, "churn.expandable_cap", "streams.expandable_cap", "graphs.expandable"]:
        page, figures = context.open(name)
        found = page.evaluate("""(() => {
            const { rows } = warpool.events;
            const seen = new Set();
            let isSorted = true;
            let events = 0;
            for (let row = 0; row < rows.count; row++) {
                if (row > 0 && rows.position[row] < rows.position[row - 1]) isSorted = false;
                if (rows.isEvent(row)) { seen.add(rows.position[row]); events += 1; }
            }
            return { isSorted, events, positions: seen.size };
        })()""")
        holds(found["isSorted"], f"{name}: in order")
        equal(found["events"], found["positions"], f"{name}: one row for each event")
        holds(found["events"] <= figures["events"], f"{name}: {found['events']} of {figures['events']}")
        # What changes nothing (a snapshot, a free that was recorded twice) is not listed; it is little.
        holds(found["events"] >= 0.97 * figures["events"], f"{name}: {found['events']} of {figures['events']}")
        page.close()


@check
def event_list_and_cursor_move_together(context):
    for width, dark in SIZES:
        page, figures = context.open(TRAINING, width=width, dark=dark)
        chosen = "document.querySelector('#events [aria-selected=true]')"
        show_events(page)
        holds("out of memory" in page.evaluate(f"{chosen}.innerText"), "it opens at the moment")
        page.key("p")
        equal(page.evaluate(f"{chosen}.cells[0].innerText"), f"{figures['peak_live']['position'] - 1:,}", "the row")
        rows = page.evaluate("document.querySelectorAll('#events tbody tr').length")
        holds(5 <= rows <= 30, f"{rows} rows exist of {figures['events']}")
        # A click on a row moves the cursor.
        target = "document.querySelectorAll('#events tbody tr')[3]"
        wanted = int(page.evaluate(f"{target}.cells[0].innerText").replace(",", "")) + 1
        page.box("#event-list")
        page.click(*page.evaluate(f"""(() => {{
            const {{ left, top, height }} = {target}.getBoundingClientRect();
            return [left + 20, top + height / 2];
        }})()"""))
        equal(view(page, "cursor"), wanted, "a click")
        page.key("e")
        page.key("ArrowDown")
        after = view(page, "cursor")
        holds(after > wanted, "down")
        page.key("ArrowUp")
        equal(view(page, "cursor"), wanted, "up")
        page.key("PageDown")
        holds(view(page, "cursor") >= wanted + 5, "a page")
        page.key("ArrowRight")
        equal(page.evaluate(f"{chosen}.cells[0].innerText"), f"{view(page, 'cursor') - 1:,}", "the list follows")
        # The last row is reached, whatever the scroll bar's precision.
        page.key("End")
        last = page.evaluate("Number([...document.querySelectorAll('#events tbody tr')].at(-1).dataset.at)")
        equal(last, page.evaluate("warpool.events.list.length") - 1, "the last row")
        fits = page.evaluate("""(() => {
            const scroll = document.getElementById("events").getBoundingClientRect();
            const last = [...document.querySelectorAll("#events tbody tr")].at(-1);
            return last.getBoundingClientRect().bottom - scroll.bottom;
        })()""")
        holds(fits <= 1, f"the last row is cut by {fits} pixels")
        equal(page.problems(), [], "problems")
        page.close()


@check
def event_list_is_filtered(context):
    page, figures = context.open(TRAINING)
    show_events(page)
    page.evaluate("""(() => {
        const action = document.getElementById("event-action");
        action.value = "5";
        action.dispatchEvent(new Event("change"));
    })()""")
    equal(page.evaluate("warpool.events.list.length"), figures["ooms"], "out of memory")
    holds(f"{figures['ooms']} shown of" in page.text("#events-note"), page.text("#events-note"))
    page.evaluate("""(() => {
        const action = document.getElementById("event-action");
        action.value = "0";
        action.dispatchEvent(new Event("change"));
        document.getElementById("event-text").focus();
    })()""")
    page.type("dropout")
    expected = page.evaluate("""(() => {
        const { allocations, stacks } = warpool.view.recording;
        const has = (stack) => warpool.view.recording.framesOfStack(stack)
            .some((frame) => stacks.frameText[frame].toLowerCase().includes("dropout"));
        const matches = (stack, at) => allocations.from[at] > 0 && has(stack);
        return [...allocations.stack].filter(matches).length;
    })()""")
    holds(expected > 24, f"{expected} allocations by dropout")
    equal(page.evaluate("warpool.events.list.length"), expected, "allocations by dropout")
    cursor = view(page, "cursor")
    page.key("Escape")
    equal(view(page, "cursor"), cursor, "typing does not move the cursor")
    page.evaluate("""(() => {
        const text = document.getElementById("event-text");
        text.value = "zzqq";
        text.dispatchEvent(new Event("input"));
    })()""")
    holds("No event is listed" in page.text("#events"), page.text("#events"))
    equal(page.problems(), [], "problems")
    page.close()


@check
def long_lists_scroll(context):
    """Two million rows: the list says so, scrolls to any of them, and a key steps by one."""
    page, _ = context.open("resnet_train.native")
    show_events(page)
    page.evaluate("""(() => {
        const { events } = warpool;
        const rows = events.rows;
        const count = 2_000_000;
        rows.position = Uint32Array.from({ length: count }, (_, at) => at + 1);
        rows.action = new Uint8Array(count);
        rows.item = new Uint32Array(count);
        rows.count = count;
        warpool.view.recording.info.events = count;
        events.filter();
    })()""")
    for position in [1, 777_777, 1_999_999]:
        view(page, f"moveCursor({position})")
        page.settle()
        shown = page.evaluate("document.querySelector('#events [aria-selected=true]').cells[0].innerText")
        equal(shown, f"{position - 1:,}", "the row of the cursor")
    milliseconds = page.evaluate("""(() => {
        const start = performance.now();
        for (let step = 0; step < 20; step++) warpool.events.moveTo(step * 99_000);
        return (performance.now() - start) / 20;
    })()""")
    holds(milliseconds < 100, f"a step takes {milliseconds} ms")
    page.evaluate("document.getElementById('events').scrollTop = 2_000_000")
    page.settle()
    page.settle()
    first = page.evaluate("warpool.events.first")
    holds(900_000 < first < 1_100_000, f"half way down is row {first}")
    page.close()


@check
def click_on_a_block_pins_its_stack_and_keeps_the_moment(context):
    for width, dark in SIZES:
        page, figures = context.open(TRAINING, width=width, dark=dark)
        stub_clipboard(page)
        cursor = view(page, "cursor")
        wide = "warpool.map.places.filter(({ piece }) => piece.allocation >= 0).sort((a, b) => b.size - a.size)[0]"
        page.click(*centre(page, f"(({{ x, y, size }}) => ({{ x: x + size / 2, y: y + 6 }}))({wide})", "#map"))
        pinned = view(page, "pinned.allocation")
        equal(pinned, page.evaluate(f"{wide}.piece.allocation"), "the block under the pointer")
        equal(view(page, "cursor"), cursor, "the cursor stays")
        holds(not page.evaluate("document.getElementById('pin').hidden"), "the panel is shown")
        frames = page.evaluate(f"""(() => {{
            const {{ recording }} = warpool.view;
            return recording.framesOf({pinned}).map((frame) => recording.stacks.frameText[frame]);
        }})()""")
        shown = page.evaluate("[...document.querySelectorAll('#pin-stack li')].map((item) => item.innerText)")
        holds(0 < len(shown) <= len(frames) and all(text in frames for text in shown), f"{shown} of {frames}")
        requested = size_text(view(page, f"recording.allocations.requested[{pinned}]"))
        allocated = size_text(view(page, f"recording.allocations.bytes[{pinned}]"))
        holds(requested in page.text("#pin-facts") and allocated in page.text("#pin-facts"), page.text("#pin-facts"))
        page.key("c")
        copied = page.evaluate("globalThis.copied")
        equal([line.strip() for line in copied.splitlines()[-len(frames):]], frames, "the whole stack is copied")
        holds(requested in copied, "with its size")
        # Buttons go to its allocation and its free; it stays pinned.
        for button, column in [("pin-to-allocation", "from"), ("pin-to-free", "waits")]:
            if page.evaluate(f"Boolean(document.getElementById('{button}'))"):
                click(page, f"#{button}")
                equal(view(page, "cursor"), view(page, f"recording.allocations.{column}[{pinned}]"), button)
                equal(view(page, "pinned.allocation"), pinned, "it stays pinned")
        page.key("Escape")
        holds(page.evaluate("document.getElementById('pin').hidden"), "Escape unpins")
        equal(page.problems(), [], "problems")
        page.close()


@check
def bands_calls_and_holders_are_pinned(context):
    page, _ = context.open(TRAINING)
    stub_clipboard(page)
    cursor = view(page, "cursor")
    # A band: the column in the middle of the longest.
    place = """(() => {
        const { bands } = warpool.bands.layout;
        const band = bands.reduce((a, b) => (b.end - b.first > a.end - a.first ? b : a));
        const column = (band.first + band.end) >> 1;
        const x = 66 + column * 2 + 1;
        for (let y = 8; y < 238; y++) if (warpool.bands.bandAt(x, y)) return { x, y };
        return null;
    })()"""
    page.click(*centre(page, place, "#bands"))
    holds(view(page, "pinned?.allocation") is not None, "a band is pinned")
    equal(view(page, "cursor"), cursor, "a click on a band keeps the moment")
    # A holder, with a key.
    page.evaluate("document.querySelectorAll('#holders tbody tr')[1].focus()")
    page.key("Enter")
    row = page.evaluate("[...document.querySelectorAll('#holders tbody tr')[1].cells].map((cell) => cell.innerText)")
    equal(page.text("#pin-title"), row[0].splitlines()[0], "the holder")
    holds(f"{row[1]} in {row[3]} blocks" in page.text("#pin-facts"), page.text("#pin-facts"))
    click(page, "#pin-search")
    equal(page.evaluate("document.getElementById('search').value"), page.text("#pin-title"), "the search")
    page.key("Escape")
    equal(view(page, "pinned"), None, "Escape unpins first")
    holds(page.evaluate("document.getElementById('search').value") != "", "and leaves the search")
    page.key("Escape")
    equal(page.evaluate("document.getElementById('search').value"), "", "the next ends the search")
    # A call of the flame graph.
    page.click(*centre(page, """(() => {
        const { places, model } = warpool.flame.graph;
        const { x, y, size } = places.find(({ node }) => model.tree.frame[node] >= 0 && model.tree.parent[node] > 0);
        return { x: x + size / 2, y: y + 9 };
    })()""", "#flame"))
    frames = page.evaluate("warpool.view.pinned.frames.length")
    holds(frames >= 1, "a call is pinned")
    click(page, "#pin-copy")
    equal(page.text("#pin-copy"), "Copied", "the button says so")
    copied = page.evaluate("globalThis.copied").splitlines()
    holds("stack, innermost first:" in copied and len(copied) > frames, f"{copied}")
    equal(view(page, "cursor"), cursor, "the moment is still the same")
    equal(page.problems(), [], "problems")
    page.close()


@check
def tooltips_are_short(context):
    page, _ = context.open(TRAINING)
    lengths = page.evaluate("""(() => {
        const { recording } = warpool.view;
        return Array.from({ length: recording.stacks.node.length }, (_, at) => recording.shortStack(at + 1).length);
    })()""")
    holds(lengths and max(lengths) <= 9, f"at most eight frames and a line: {max(lengths)}")
    page.close()


def with_category_changes(context):
    """The page of a difference, with categories of both."""
    path, _ = context.difference()

    def set_categories(manifest):
        pair = manifest["difference"][0]
        pair["categories_before"] = [{"name": "parameters", "bytes": 3 << 30}, {"name": "inputs", "bytes": 5 << 20}]
        pair["categories_after"] = [{"name": "parameters", "bytes": 3 << 30}, {"name": "inputs", "bytes": 1 << 20},
                                    {"name": "activations", "bytes": 7 << 20}]

    return context.changed(path, "difference_categories.html", set_categories)


@check
def difference_has_categories(context):
    page = context.browser.open(with_category_changes(context))
    rows = page.evaluate("""[...document.querySelectorAll("#category-changes tbody tr")].map(
        (row) => [...row.cells].map((cell) => cell.innerText))""")
    swatches = page.evaluate("[...document.querySelectorAll('#category-changes i')].map((it) => it.style.background)")
    equal([bool(colour) for colour in swatches], [True] * 3, "every category has its colour")
    equal(len(set(swatches)), 3, "of its own")
    equal(rows, [["parameters", "3 GiB", "3 GiB", "–"], ["inputs", "5 MiB", "1 MiB", "−4 MiB"],
                 ["activations", "0 B", "7 MiB", "+7 MiB"]], "the rows")
    page.close()

    def without(manifest):
        manifest["difference"][0]["categories_before"] = manifest["difference"][0]["categories_after"] = []

    page = context.browser.open(context.changed(context.difference()[0], "difference_plain.html", without))
    holds(page.evaluate("document.getElementById('by-category').hidden"), "hidden where nothing is known")
    page.close()
