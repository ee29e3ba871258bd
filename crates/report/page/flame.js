// A flame graph of who holds memory, outermost calls on top: as wide as the bytes that are live below a call.

import { formatBytes, formatShare } from "./format.js";
import { Surface, fitText, pointerIn } from "./canvas.js";
import { theme } from "./theme.js";
import { groupColour, paleCategory } from "./colours.js";
import { pinCall } from "./pin.js";
import { hideTooltip, showTooltip } from "./tooltip.js";

const FLAME_ROW = 18;

/** Calls as a tree for drawing: node 0 is everything. Frames that only call on may be left out. */
export class FlameTree {
  constructor(recording, showsAll) {
    this.recording = recording;
    const { stacks, allocations, groups } = recording;
    this.parent = [-1];
    this.text = ["all"];
    this.kind = ["root"];
    this.frame = [-1];
    this.group = [-1];
    const known = new Map();
    const add = (parent, key, text, kind, frame, group = -1) => {
      const full = `${parent} ${key}`;
      let node = known.get(full);
      if (node === undefined) {
        node = this.parent.length;
        known.set(full, node);
        this.parent.push(parent);
        this.text.push(text);
        this.kind.push(kind);
        this.frame.push(frame);
        this.group.push(group);
      }
      return node;
    };
    const nodeOf = new Int32Array(stacks.parent.length);
    for (let at = 0; at < nodeOf.length; at++) {
      const frame = stacks.frame[at];
      const above = stacks.parent[at] < 0 ? 0 : nodeOf[stacks.parent[at]];
      const isLeftOut = stacks.passesThrough[frame] && !showsAll;
      const kind = stacks.isOwn[frame] ? "own" : "framework";
      nodeOf[at] = isLeftOut ? above : add(above, frame, stacks.frameText[frame], kind, frame);
    }
    // Without stacks there are sizes.
    const hasStacks = stacks.node.length > 0;
    this.leaf = new Int32Array(allocations.count);
    const leafOfGroup = [];
    const sizeLeaf = (group) => {
      const top = hasStacks ? add(0, "none", "no call stack", "size", -1) : 0;
      return add(top, groups.list[group].call, groups.list[group].call, "size", -1, group);
    };
    for (let at = 0; at < allocations.count; at++) {
      const stack = allocations.stack[at];
      const group = groups.of[at];
      this.leaf[at] = stack ? nodeOf[stacks.node[stack - 1]] : (leafOfGroup[group] ??= sizeLeaf(group));
    }
    const weight = new Float64Array(this.parent.length);
    for (let at = 0; at < allocations.count; at++) {
      const life = Math.min(allocations.until[at], recording.events + 1) - allocations.from[at];
      weight[this.leaf[at]] += allocations.requested[at] * life;
    }
    sumUp(weight, this.parent);
    this.children = this.parent.map(() => []);
    for (let node = 1; node < this.parent.length; node++) this.children[this.parent[node]].push(node);
    // One order for all positions, so that calls keep their places when the cursor moves.
    for (const list of this.children) list.sort((a, b) => weight[b] - weight[a] || a - b);
  }

  /** The bytes and blocks below every node at a position. */
  totalsAt(position) {
    const { allocations } = this.recording;
    const bytes = new Float64Array(this.parent.length);
    const count = new Float64Array(this.parent.length);
    for (const at of this.recording.activeAt(position)) {
      if (allocations.waits[at] <= position) continue;
      bytes[this.leaf[at]] += allocations.requested[at];
      count[this.leaf[at]] += 1;
    }
    sumUp(bytes, this.parent);
    sumUp(count, this.parent);
    return { bytes, count };
  }

  /** The category with the most bytes below every node at a position; -1 where nothing is allocated. */
  categoriesAt(position) {
    const { allocations, categories } = this.recording;
    const sums = categories.map(() => new Float64Array(this.parent.length));
    for (const at of this.recording.activeAt(position)) {
      if (allocations.waits[at] > position) sums[allocations.category[at]][this.leaf[at]] += allocations.requested[at];
    }
    for (const sum of sums) sumUp(sum, this.parent);
    const larger = (node) => (best, sum, index) => (sum[node] > (sums[best]?.[node] ?? 0) ? index : best);
    return this.parent.map((_, node) => sums.reduce(larger(node), -1));
  }

  /** Whether a node is below another, or it. */
  isBelow(node, above) {
    for (let at = node; at >= 0; at = this.parent[at]) if (at === above) return true;
    return false;
  }

  /** The frames from a node outwards. */
  framesFrom(node) {
    const frames = [];
    for (let at = node; at > 0; at = this.parent[at]) if (this.frame[at] >= 0) frames.push(this.frame[at]);
    return frames;
  }
}

/** Adds every node's value to those above it. Parents have smaller numbers. */
function sumUp(values, parent) {
  for (let node = values.length - 1; node > 0; node--) values[parent[node]] += values[node];
}

/** Draws a tree: `value(node)`, `colour(node)`, `lines(node)` say what of it. */
export class FlameGraph {
  constructor(canvas) {
    this.canvas = canvas;
    this.focus = 0;
    this.places = [];
    this.surface = new Surface(canvas, (...args) => this.draw(...args));
    this.surface.height = (width) => this.measure(width);
    canvas.addEventListener("pointermove", (event) => {
      const node = this.find(pointerIn(event, canvas));
      if (node === undefined) hideTooltip();
      else showTooltip(event, this.model.lines(node));
    });
    canvas.addEventListener("pointerleave", hideTooltip);
    canvas.addEventListener("click", (event) => {
      const node = this.find(pointerIn(event, canvas));
      if (node === undefined) return;
      this.zoomTo(node === this.focus ? 0 : node);
      if (node > 0) this.model.pin?.(node);
    });
  }

  /** Shows a model, which has `tree`, `value`, `colour`, `isDim` and `lines`. */
  show(model) {
    if (this.model?.tree !== model.tree) this.focus = 0;
    this.model = model;
    this.surface.redraw();
  }

  zoomTo(node) {
    this.focus = node;
    this.surface.redraw();
  }

  find({ x, y }) {
    return this.places.find((at) => y >= at.y && y < at.y + FLAME_ROW && x >= at.x && x < at.x + at.size)?.node;
  }

  /** Finds the places of all nodes that are wide enough, and returns the height. */
  measure(width) {
    this.places = [];
    if (!this.model) return FLAME_ROW;
    const { tree, value } = this.model;
    const above = [];
    for (let node = this.focus; node >= 0; node = tree.parent[node]) above.unshift(node);
    above.forEach((node, depth) => this.places.push({ node, x: 0, y: depth * FLAME_ROW, size: width }));
    const whole = value(this.focus);
    const stack = whole > 0 ? [{ node: this.focus, x: 0, depth: above.length - 1 }] : [];
    let depthMax = above.length;
    while (stack.length > 0) {
      const { node, x, depth } = stack.pop();
      let left = x;
      for (const child of tree.children[node]) {
        const size = (value(child) / whole) * width;
        if (size >= 0.7) {
          this.places.push({ node: child, x: left, y: (depth + 1) * FLAME_ROW, size });
          depthMax = Math.max(depthMax, depth + 2);
          stack.push({ node: child, x: left, depth: depth + 1 });
        }
        left += size;
      }
    }
    return depthMax * FLAME_ROW + 2;
  }

  draw(context) {
    const colours = theme();
    const { model } = this;
    if (!model) return;
    context.font = colours.font;
    context.textBaseline = "middle";
    context.textAlign = "left";
    for (const { node, x, y, size } of this.places) {
      context.globalAlpha = model.isDim(node) ? 0.25 : 1;
      context.fillStyle = model.colour(node);
      context.fillRect(x, y, Math.max(0.7, size - 1), FLAME_ROW - 1);
      if (size > 40) {
        context.fillStyle = theme().isDark ? "#0e1116" : "#16202b";
        context.fillText(fitText(context, model.label(node), size - 10), x + 5, y + FLAME_ROW / 2);
      }
    }
    context.globalAlpha = 1;
  }
}

/** The colours of frames: the program's own code stands out. */
export function frameColour(kind, node) {
  const { isDark } = theme();
  const shade = ((node * 7) % 5) * 0.012;
  if (kind === "own") return `oklch(${(isDark ? 0.72 : 0.8) + shade} 0.12 65)`;
  if (kind === "framework") return `oklch(${(isDark ? 0.62 : 0.86) + shade} 0.045 245)`;
  return `oklch(${(isDark ? 0.62 : 0.87) + shade} 0.01 245)`;
}

/** The flame graph at the cursor of a view. */
export class CursorFlame {
  constructor(canvas, view, note) {
    this.view = view;
    this.note = note;
    this.graph = new FlameGraph(canvas);
    this.trees = new Map();
    view.listen(["recording", "cursor", "search", "frames", "colour"], () => this.update());
  }

  tree() {
    const { recording, showsAllFrames } = this.view;
    if (this.recording !== recording) {
      this.recording = recording;
      this.trees.clear();
    }
    if (!this.trees.has(showsAllFrames)) this.trees.set(showsAllFrames, new FlameTree(recording, showsAllFrames));
    return this.trees.get(showsAllFrames);
  }

  update() {
    const tree = this.tree();
    const { recording, cursor, search, colourBy } = this.view;
    const { bytes, count } = tree.totalsAt(cursor);
    const byCategory = colourBy === "category" && tree.categoriesAt(cursor);
    const isFound = search && foundNodes(tree, search);
    this.note.textContent = recording.info.has_stacks
      ? `${byCategory ? "coloured by the category with most bytes" : "your code stands out"}; ` +
        "click a call to enlarge it and pin its stack"
      : "by size: the recording has no call stacks";
    this.graph.show({
      tree,
      value: (node) => bytes[node],
      label: (node) => (node === 0 ? `all: ${formatBytes(bytes[0])}` : tree.text[node]),
      pin: (node) => {
        const title = tree.text[node];
        const frames = tree.framesFrom(node);
        this.view.pin(pinCall(recording, { title, frames, isBelow: (at) => tree.isBelow(tree.leaf[at], node) }));
      },
      colour: (node) => {
        if (byCategory && byCategory[node] >= 0) return paleCategory(byCategory[node]);
        const group = recording.groups.list[tree.group[node]];
        return group ? groupColour(group.rank) : frameColour(tree.kind[node], node);
      },
      isDim: (node) => isFound && !isFound[node],
      lines: (node) => [
        tree.text[node],
        `${formatBytes(bytes[node])} in ${count[node]} ${count[node] === 1 ? "block" : "blocks"}, ` +
          `${formatShare(bytes[node], bytes[0])} of what is allocated`,
        byCategory && byCategory[node] >= 0 && `mostly ${recording.categories[byCategory[node]].label}`,
      ],
    });
  }
}

/** Nodes that a search finds, and all above and below them. */
function foundNodes(tree, search) {
  const found = new Uint8Array(tree.parent.length);
  for (let node = 1; node < found.length; node++) {
    const frame = tree.frame[node];
    const own = frame >= 0 ? search.frames[frame] : tree.text[node].toLowerCase().includes(search.text);
    found[node] = own || found[tree.parent[node]] ? 1 : 0;
  }
  const shown = Uint8Array.from(found);
  for (let node = found.length - 1; node > 0; node--) if (shown[node]) shown[tree.parent[node]] = 1;
  return shown;
}
