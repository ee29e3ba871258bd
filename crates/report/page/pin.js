// A panel with the whole stack of what was clicked: a block, a band, a holder or a call. It stays until it is closed,
// and the cursor stays where it is: the panel has buttons to go to the allocation or the free.

import { NEVER, eventName } from "./recording.js";
import { formatBytes, formatCount, formatShare, formatTime } from "./format.js";
import { byId, copyText, make, makeButton } from "./dom.js";

/** A block. */
export function pinAllocation(recording, at) {
  const { allocations, stacks } = recording;
  const { bytes, requested, from, waits, until, addr, category } = allocations;
  const isFreed = until[at] !== NEVER;
  const rounding = bytes[at] - requested[at];
  const facts = [
    ["requested", formatBytes(requested[at])],
    ["allocated", `${formatBytes(bytes[at])}${rounding > 0 ? `, with ${formatBytes(rounding)} rounding` : ""}`],
    ["address", `0x${addr[at].toString(16)}`],
    ["allocated at", from[at] === 0 ? "before the history" : momentText(recording, from[at])],
    ["freed at", isFreed ? momentText(recording, waits[at]) : "never"],
  ];
  if (isFreed) facts.push(["lived", formatTime(recording.timeOf(until[at]) - recording.timeOf(from[at]))]);
  if (isFreed && until[at] - waits[at] > 1) facts.push(["waited for streams until", momentText(recording, until[at])]);
  if (recording.hasCategories) facts.push(["category", recording.categories[category[at]].label]);
  return {
    title: `Block of ${formatBytes(requested[at])}`,
    allocation: at,
    facts: () => [...facts, ...contextFacts(recording, from[at])],
    frames: recording.framesOf(at),
    call: allocations.stack[at] ? stacks.sites[stacks.site[allocations.stack[at] - 1]].call : "",
  };
}

/** Who holds memory: all blocks of one group. Its stack is the one that holds most at the position. */
export function pinHolder(recording, group, position) {
  const { allocations, groups } = recording;
  const bytesOf = new Map();
  for (const at of blocksAt(recording, group, position)) {
    const stack = allocations.stack[at];
    bytesOf.set(stack, (bytesOf.get(stack) ?? 0) + allocations.requested[at]);
  }
  const [[stack] = [0]] = [...bytesOf].sort((a, b) => b[1] - a[1]);
  const { call, line } = groups.list[group];
  return {
    title: call,
    group,
    facts: (cursor) => {
      const facts = holderFacts(recording, blocksAt(recording, group, cursor), cursor);
      if (line && line !== call) facts.push(["from", line]);
      if (bytesOf.size > 1) facts.push(["stacks", `${formatCount(bytesOf.size)}; the one with most bytes is shown`]);
      return facts;
    },
    frames: recording.framesOfStack(stack),
    call,
  };
}

/** A call of the flame graph, with all blocks below it. `frames` are those from it outwards. */
export function pinCall(recording, { title, frames, isBelow }) {
  const { waits } = recording.allocations;
  const below = (cursor) => recording.activeAt(cursor).filter((at) => waits[at] > cursor && isBelow(at));
  return { title, facts: (cursor) => holderFacts(recording, below(cursor), cursor), frames, call: title };
}

function blocksAt(recording, group, position) {
  const { allocations, groups } = recording;
  return recording.activeAt(position).filter((at) => groups.of[at] === group && allocations.waits[at] > position);
}

/** Some blocks at the cursor: bytes, and which categories they are of. */
function holderFacts(recording, blocks, cursor) {
  const { allocations, categories } = recording;
  const sum = (list, values) => list.reduce((total, at) => total + values[at], 0);
  const requested = sum(blocks, allocations.requested);
  const share = formatShare(requested, recording.sampleAt(cursor).allocated);
  const count = `${formatCount(blocks.length)} ${blocks.length === 1 ? "block" : "blocks"}`;
  const facts = [
    ["requested", `${formatBytes(requested)} in ${count}, ${share}`],
    ["allocated", formatBytes(sum(blocks, allocations.bytes))],
  ];
  const byCategory = categories.map(({ label }, index) => {
    return [label, sum(blocks.filter((at) => allocations.category[at] === index), allocations.requested)];
  });
  const known = byCategory.filter(([, bytes]) => bytes > 0).sort((a, b) => b[1] - a[1]);
  if (known.length) {
    facts.push(["category", known.map(([label, bytes]) => `${label} ${formatBytes(bytes)}`).join(", ")]);
  }
  return facts;
}

function momentText(recording, position) {
  return `${eventName(position)}, ${formatTime(recording.timeOf(position))}`;
}

function contextFacts(recording, position) {
  return recording.contextLines(position).map((line) => line.split(/: (.*)/s).slice(0, 2));
}

/** What is copied: what it is, and its frames, innermost first. */
export function pinText(recording, pinned, cursor) {
  const facts = pinned.facts(cursor).map(([name, value]) => `${name}: ${value}`);
  const frames = pinned.frames.map((frame) => `  ${recording.stacks.frameText[frame]}`);
  return [pinned.title, ...facts, ...(frames.length ? ["stack, innermost first:", ...frames] : [])].join("\n");
}

/** The panel. */
export class PinPanel {
  constructor(panel, view, onSearch) {
    this.panel = panel;
    this.view = view;
    this.onSearch = onSearch;
    this.showsAll = false;
    view.listen(["pin", "cursor", "recording"], () => this.update());
  }

  /** Copies the stack, if one is pinned. */
  copy() {
    if (this.view.pinned) byId("pin-copy").click();
  }

  /** Closes it; whether it was open. */
  close() {
    const { view, panel } = this;
    if (!view.pinned) return false;
    const hadFocus = panel.contains(document.activeElement);
    view.pin(null);
    if (hadFocus) byId("timeline").focus({ preventScroll: true });
    return true;
  }

  update() {
    const { panel, view } = this;
    const { pinned, recording, cursor } = view;
    panel.hidden = !pinned;
    document.documentElement.classList.toggle("has-pin", Boolean(pinned));
    if (!pinned) {
      this.shown = null;
      return;
    }
    byId("pin-facts").replaceChildren(
      ...pinned.facts(cursor).map(([name, value]) => make("div", "", make("dt", "", name), make("dd", "", value))),
    );
    if (this.shown === pinned) return;
    this.shown = pinned;
    this.showsAll = false;
    byId("pin-title").textContent = pinned.title;
    byId("pin-tools").replaceChildren(...this.buttons(pinned, recording));
    this.fillStack();
    panel.scrollTop = 0;
  }

  buttons(pinned, recording) {
    const { view } = this;
    const copy = makeButton("Copy stack", () => {
      copyText(pinText(recording, pinned, view.cursor), copy);
    }, "Copy the stack as text (c)");
    copy.id = "pin-copy";
    const buttons = [copy];
    const { from, waits } = recording.allocations;
    const goTo = (id, label, position) => {
      const button = makeButton(label, () => view.moveCursor(position));
      button.id = id;
      buttons.push(button);
    };
    const at = pinned.allocation;
    if (at >= 0 && from[at] > 0) goTo("pin-to-allocation", "Go to allocation", from[at]);
    if (at >= 0 && waits[at] !== NEVER) goTo("pin-to-free", "Go to free", waits[at]);
    if (pinned.call) {
      const search = makeButton("Search this call", () => this.onSearch(pinned.call));
      search.id = "pin-search";
      buttons.push(search);
    }
    const close = makeButton("Unpin", () => this.close(), "Unpin (Esc)");
    close.id = "pin-close";
    buttons.push(close);
    return buttons;
  }

  /** The frames that tell something; the others on request. */
  fillStack() {
    const { recording, pinned } = this.view;
    const { frameText, isOwn } = recording.stacks;
    const frames = this.showsAll ? pinned.frames : recording.readable(pinned.frames);
    const items = frames.map((frame) => make("li", isOwn[frame] ? "own" : "", frameText[frame]));
    if (items.length === 0) items.push(make("li", "", "The recording has no call stack for it."));
    byId("pin-stack").replaceChildren(...items);
    const more = byId("pin-more");
    const hidden = pinned.frames.length - frames.length;
    more.hidden = hidden === 0 && !this.showsAll;
    more.textContent = this.showsAll ? "Show fewer frames" : `Show all ${formatCount(pinned.frames.length)} frames`;
    more.onclick = () => {
      this.showsAll = !this.showsAll;
      this.fillStack();
    };
  }
}
