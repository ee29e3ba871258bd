"""Checks of the heat map of many ranks: what it draws, and what a click and keys open."""

import json
import os
import shutil
import subprocess

from expect import equal, holds, size_text

CHECKS = []
RECORDINGS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../../recordings")
RANKS = {"rank0": "verdict.limit", "rank2": "verdict.limit", "rank10": "verdict.growth", "rank3": "train.default"}


def check(function):
    CHECKS.append(function)
    return function


def made(context):
    """The page of a job with a damaged rank, and what the command prints about it."""
    if "ranks" not in context.pages:
        folder = os.path.join(context.folder, "job")
        os.mkdir(folder)
        for rank, name in RANKS.items():
            shutil.copy(os.path.join(RECORDINGS, f"{name}.pickle.xz"), os.path.join(folder, f"{rank}.pickle.xz"))
        with open(os.path.join(folder, "rank4.pickle"), "wb") as file:
            file.write(b"\x80\x02}q\x00")
        page = os.path.join(context.folder, "ranks.html")
        done = subprocess.run([context.warpool, "view", folder, "-o", page, "--pages", "--no-fits", "--json"],
                              capture_output=True, text=True, check=False)
        equal(done.returncode, 2, f"one is damaged: {done.stderr}")
        context.pages["ranks"] = page, json.loads(done.stdout)
    return context.pages["ranks"]


def click_row(page, line):
    box = page.box("#heat")
    height = page.evaluate("warpool.rowHeight")
    page.click(box["left"] + box["width"] / 2, box["top"] + (line + 0.5) * height)


def colour_at(page, x, y):
    """The colour of a pixel of the map, by its place in CSS pixels."""
    return page.evaluate(f"""(() => {{
        const canvas = document.querySelector("#heat canvas");
        const scale = canvas.width / canvas.clientWidth;
        return [...canvas.getContext("2d").getImageData({x} * scale, {y} * scale, 1, 1).data];
    }})()""")


@check
def a_click_opens_a_rank(context):
    path, report = made(context)
    page = context.browser.open(path)
    equal(page.text("#headline"), report["headline"], "the headline")
    names = [row["name"] for row in report["ranks"]]
    equal(names, ["rank 0", "rank 2", "rank 3", "rank 4", "rank 10"], "in natural order")
    title = page.text("#rank-title")
    holds(title.startswith(f"{report['limiting'][0]}: "), f"the one that limits is open: {title}")
    for line, row in enumerate(report["ranks"]):
        click_row(page, line)
        title = page.text("#rank-title")
        if row["error"]:
            equal(title, f"{row['name']}: cannot be read", "a damaged one")
            holds(row["error"] in page.text("#rank-prose"), "says why")
            holds(page.evaluate("document.getElementById('rank-shown').hidden"), "and has no figures")
            continue
        holds(title.startswith(f"{row['name']}: "), title)
        shown = page.evaluate("""Object.fromEntries([...document.querySelectorAll("#rank-figures dd")].map(
            (data) => [data.dataset.figure, data.firstChild.textContent]))""")
        equal(shown["most-allocated"], size_text(row["peak_allocated_bytes"]), "most allocated")
        equal(shown["most-reserved"], size_text(row["peak_reserved_bytes"]), "most reserved")
        holds(row["held_most_by"]["name"] in page.text("#rank-holders"), "who holds most")
        link = page.evaluate("document.querySelector('#rank-tools a').getAttribute('href')")
        linked = os.path.join(os.path.dirname(path), link)
        with open(linked, encoding="utf-8") as file:
            holds(file.read(40).startswith("<!doctype html>\n<!-- warpool report"), "its own page")
    equal(page.problems(), [], "problems")
    page.close()
    # The page that a click leads to is a report of its own.
    page = context.browser.open(linked)
    holds(page.evaluate("warpool.view.recording.events") > 0, "it has events")
    page.close()


@check
def the_map_shows_memory_over_time(context):
    path, report = made(context)
    for dark in (False, True):
        page = context.browser.open(path, dark=dark)
        height = page.evaluate("warpool.rowHeight")
        width = page.evaluate("document.getElementById('heat').clientWidth")
        for line, row in enumerate(report["ranks"]):
            values = page.evaluate(f"warpool.values(warpool.rows[{line}])")
            equal(len(values), 0 if row["error"] else 96, row["name"])
            if row["error"]:
                equal(colour_at(page, width / 2, (line + 0.5) * height)[3], 0, "nothing is drawn for a damaged one")
                continue
            equal(max(values), row["peak_allocated_bytes"], "the most of all columns")
            [start, end] = page.evaluate(f"warpool.range(warpool.rows[{line}], {width})")
            holds(0 < start < end <= width, f"{start} to {end}")
            # Where the most and the least is allocated.
            at = {key: start + (end - start) * (values.index(key(values)) + 0.5) / 96 for key in (max, min)}
            colours = {key: colour_at(page, x, (line + 0.3) * height) for key, x in at.items()}
            holds(all(colour[3] == 255 for colour in colours.values()), "both are drawn")
            if max(values) > 4 * max(1, min(values)) and end - start > 200:
                brighter = sum(colours[max][:3]) > sum(colours[min][:3])
                equal(brighter, dark, f"more memory stands out more: {colours}")
        page.close()


@check
def order_search_and_keys(context):
    path, report = made(context)
    page = context.browser.open(path)
    order = "warpool.shown.map((at) => warpool.rows[at].name)"
    page.evaluate("warpool.setOrder('limiting')")
    equal(page.evaluate(order), [*report["limiting"], "rank 4"], "those that limit first")
    page.evaluate("warpool.setOrder('rank')")
    click_row(page, 0)
    page.evaluate("document.getElementById('heat').focus()")
    page.key("ArrowDown")
    holds(page.text("#rank-title").startswith("rank 2: "), page.text("#rank-title"))
    page.key("/")
    page.type("rank10")
    equal(page.evaluate(order), ["rank 10"], "found by its file")
    page.key("Escape")
    equal(len(page.evaluate(order)), 5, "all again")
    page.evaluate("warpool.setMetric('reserved')")
    equal(page.evaluate("Math.max(...warpool.values(warpool.rows[0]))"), report["ranks"][0]["peak_reserved_bytes"],
          "the most reserved")
    equal(page.problems(), [], "problems")
    page.close()
