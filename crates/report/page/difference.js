// The difference of two recordings: both over time, what is new, gone, grown or shrunk, and a flame graph of both.

import { Recording } from "./recording.js";
import { formatBytes, formatCount, signedBytes } from "./format.js";
import { Surface } from "./canvas.js";
import { pixelColumns } from "./columns.js";
import { drawAreas, drawByteAxis, drawMarks, drawTimeAxis } from "./timeline.js";
import { FlameGraph, FlameTree } from "./flame.js";
import { byId, make, swatch } from "./dom.js";
import { layersOf } from "./layers.js";
import { figure } from "./summary.js";
import { fillLegend } from "./report.js";
import { View } from "./view.js";
import { onThemeChange, theme } from "./theme.js";

const KINDS = ["new", "gone", "grown", "shrunk"];

export class Difference {
  static async open(manifest) {
    const difference = new Difference();
    difference.manifest = manifest;
    difference.kinds = new Set(KINDS);
    difference.text = "";
    difference.showsAllFrames = false;
    byId("main").replaceChildren(byId("difference").content.cloneNode(true));
    difference.connect();
    await difference.openPair(0);
    return difference;
  }

  async openPair(number) {
    const pair = (this.pair = this.manifest.difference[number]);
    this.sides = await Promise.all([pair.before, pair.after].map((side) => Recording.open(side)));
    this.views = this.sides.map((recording) => new View(recording));
    this.update();
  }

  connect() {
    const { difference: pairs } = this.manifest;
    byId("devices").hidden = pairs.length < 2;
    byId("device").replaceChildren(...pairs.map((pair, at) => new Option(pair.name, String(at))));
    byId("device").addEventListener("change", () => this.openPair(Number(byId("device").value)));
    byId("search").addEventListener("input", () => this.search(byId("search").value));
    byId("frames").addEventListener("click", () => {
      this.showsAllFrames = !this.showsAllFrames;
      this.updateFlame();
    });
    byId("kinds").replaceChildren(
      ...KINDS.map((kind) => {
        const button = make("button", "", kind);
        button.type = "button";
        button.setAttribute("aria-pressed", "true");
        button.addEventListener("click", () => {
          if (!this.kinds.delete(kind)) this.kinds.add(kind);
          button.setAttribute("aria-pressed", String(this.kinds.has(kind)));
          this.updateTable();
        });
        return button;
      }),
    );
    this.flame = { graph: new FlameGraph(byId("flame")) };
    this.surfaces = ["before", "after"].map((id, side) => {
      return new Surface(byId(id), (context, width, height) => this.drawSide(side, context, width, height));
    });
    onThemeChange(() => this.update());
  }

  search(text) {
    if (byId("search").value !== text) byId("search").value = text;
    this.text = text.trim().toLowerCase();
    this.updateTable();
    this.updateFlame();
  }

  update() {
    const { pair } = this;
    byId("headline").textContent = pair.headline;
    byId("prose").replaceChildren(...pair.prose.map((line) => make("p", "", line)));
    const change = (before, after) => `${after >= before ? "+" : "−"}${formatBytes(Math.abs(after - before))}`;
    const sides = [pair.before.figures, pair.after.figures];
    const values = (name, of) => {
      const [before, after] = sides.map(of);
      return figure(name, `${formatBytes(before)} → ${formatBytes(after)}`, change(before, after));
    };
    byId("figures").replaceChildren(
      figure(
        "allocated at these moments",
        `${formatBytes(pair.allocated_before)} → ${formatBytes(pair.allocated_after)}`,
        change(pair.allocated_before, pair.allocated_after),
      ),
      values("most allocated", (figures) => figures.peak_live.live_bytes),
      values("most reserved", (figures) => figures.peak_reserved.reserved_bytes),
    );
    byId("before-name").textContent = pair.before.name;
    byId("after-name").textContent = pair.after.name;
    fillLegend(byId("legend"), layersOf(this.sides[0], "part"), [...pair.before.marks, ...pair.after.marks]);
    this.updateCategories();
    for (const surface of this.surfaces) surface.redraw();
    this.updateTable();
    this.updateFlame();
  }

  drawSide(side, context, width, height) {
    if (!this.views) return;
    const all = this.views.map((view) => pixelColumns(view.recording, view, width));
    const top = Math.max(...all.map((columns) => columns.top));
    const view = this.views[side];
    const scale = drawByteAxis(context, width, height, top * 1.04);
    drawAreas(context, all[side], scale, layersOf(view.recording, "part"));
    drawMarks(context, width, height, view);
    drawTimeAxis(context, width, height, view);
    const x = view.x(view.unitOf(view.cursor), width);
    context.fillStyle = theme().accent;
    context.fillRect(Math.round(x) - 1, 0, 2, height - 22);
  }

  /** Which kinds of memory changed, where the recordings tell. */
  updateCategories() {
    const { categories_before: before = [], categories_after: after = [] } = this.pair;
    const bytesIn = (list, wanted) => list.find(({ name }) => name === wanted)?.bytes ?? 0;
    const names = [...new Set([...before, ...after].map(({ name }) => name))];
    byId("by-category").hidden = names.length === 0;
    const head = make("tr", "", make("th", "", "category"));
    for (const name of ["first", "second", "difference"]) head.append(make("th", "number", name));
    const sizesOf = (name) => [bytesIn(before, name), bytesIn(after, name)];
    const rows = names.filter((name) => sizesOf(name).some((bytes) => bytes > 0)).map((name) => {
      const sizes = sizesOf(name);
      const change = sizes[1] - sizes[0];
      const direction = change > 0 ? "grown" : change < 0 ? "shrunk" : "";
      const row = make("tr", "", make("td", "", swatch(theme().categoryNamed(name)), name));
      for (const bytes of sizes) row.append(make("td", "number", formatBytes(bytes)));
      row.append(make("td", `number ${direction}`, change === 0 ? "–" : signedBytes(change)));
      return row;
    });
    byId("category-changes").replaceChildren(make("thead", "", head), make("tbody", "", ...rows));
  }

  updateTable() {
    const { changes } = this.pair;
    const matches = ({ name, line, path }) => {
      return !this.text || [name, line ?? "", ...path].some((part) => part.toLowerCase().includes(this.text));
    };
    const shown = changes.filter((change) => this.kinds.has(change.kind) && matches(change));
    const largest = changes.reduce((most, change) => Math.max(most, bytesChanged(change)), 1);
    const head = make("tr", "", make("th", "", "allocated by"), make("th", "", ""));
    for (const name of ["first", "second", "difference"]) head.append(make("th", "number", name));
    head.append(make("th", "", ""), make("th", "number", "blocks"));
    const rows = shown.slice(0, 400).map((change) => changeRow(change, largest));
    const nothing = changes.length ? "Nothing to show." : "No difference.";
    if (rows.length === 0) rows.push(make("tr", "", make("td", "", nothing)));
    byId("changes").replaceChildren(make("thead", "", head), make("tbody", "", ...rows));
    byId("found").textContent = this.text ? `${formatCount(shown.length)} of ${formatCount(changes.length)}` : "";
  }

  updateFlame() {
    byId("frames").textContent = this.showsAllFrames ? "wrappers shown" : "wrappers hidden";
    byId("flame-note").textContent = "as wide as the bytes of both; red has more in the second, blue has less";
    const tree = bothTrees(this.sides, this.views, this.showsAllFrames);
    const { text } = this;
    const isFound = text && tree.text.map((own) => own.toLowerCase().includes(text));
    if (isFound) {
      for (let node = 1; node < isFound.length; node++) {
        const parent = tree.parent[node];
        isFound[node] ||= parent > 0 && isFound[parent];
      }
      for (let node = isFound.length - 1; node > 0; node--) if (isFound[node]) isFound[tree.parent[node]] = true;
    }
    this.flame.graph.show({
      tree,
      value: (node) => tree.before[node] + tree.after[node],
      label: (node) => tree.text[node],
      colour: (node) => changeColour(tree.before[node], tree.after[node]),
      isDim: (node) => isFound && !isFound[node],
      lines: (node) => [
        tree.text[node],
        `${formatBytes(tree.before[node])} in the first, ${formatBytes(tree.after[node])} in the second`,
      ],
    });
  }
}

function bytesChanged({ bytes_before: before, bytes_after: after }) {
  return Math.abs(after - before);
}

function changeRow({ kind, name, line, bytes_before: before, bytes_after: after, count_before, count_after }, largest) {
  const direction = after >= before ? "grown" : "shrunk";
  const by = Math.abs(after - before);
  const call = make("td", "", make("div", "call", name));
  if (line && line !== name) call.append(make("div", "line", `from ${line}`));
  const bar = make("b", direction);
  bar.style.width = `${Math.max(1, (100 * by) / largest)}%`;
  const row = make("tr", "", call, make("td", direction, kind));
  row.append(make("td", "number", formatBytes(before)), make("td", "number", formatBytes(after)));
  row.append(make("td", `number ${direction}`, `${after >= before ? "+" : "−"}${formatBytes(by)}`));
  const blocks = `${formatCount(count_before)} → ${formatCount(count_after)}`;
  row.append(make("td", "bar-cell", bar), make("td", "number", blocks));
  return row;
}

/** Red has more in the second recording, blue has less; the more saturated, the larger the share. */
function changeColour(before, after) {
  const share = (after - before) / Math.max(1, after + before);
  const { isDark } = theme();
  const lightness = isDark ? 0.68 - 0.06 * Math.abs(share) : 0.88 - 0.14 * Math.abs(share);
  return `oklch(${lightness} ${0.012 + 0.13 * Math.abs(share)} ${share >= 0 ? 30 : 250})`;
}

/** One tree of the calls of both, with the bytes of each at its moment. */
function bothTrees(sides, views, showsAll) {
  const tree = { parent: [-1], text: ["all"], children: [[]], before: [0], after: [0] };
  const known = new Map();
  sides.forEach((recording, side) => {
    const own = new FlameTree(recording, showsAll);
    const { bytes } = own.totalsAt(views[side].cursor);
    const nodeOf = [0];
    for (let node = 0; node < own.parent.length; node++) {
      if (node > 0) {
        const above = nodeOf[own.parent[node]];
        const key = `${above} ${own.text[node]}`;
        if (!known.has(key)) {
          known.set(key, tree.parent.length);
          tree.children[above].push(tree.parent.length);
          tree.parent.push(above);
          tree.text.push(own.text[node]);
          tree.children.push([]);
          tree.before.push(0);
          tree.after.push(0);
        }
        nodeOf.push(known.get(key));
      }
      tree[side === 0 ? "before" : "after"][nodeOf[node]] += bytes[node];
    }
  });
  const value = (node) => tree.before[node] + tree.after[node];
  for (const list of tree.children) list.sort((a, b) => value(b) - value(a) || a - b);
  return tree;
}
