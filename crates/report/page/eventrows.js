// The events of a recording as rows, made from what the page has: allocations, reserved ranges and marks.
// Events of allocations that were left out for size are not among them.

import { NEVER, markText } from "./recording.js";

/** What may happen, by number. The order is that of events at one position. */
export const ACTIONS = [
  "alloc", "free requested", "free completed", "segment reserved", "segment released", "out of memory", "retry",
];
const [FREE_COMPLETED, RESERVED, RELEASED, RETRY] = [2, 3, 4, 6];

export class EventRows {
  constructor(recording) {
    this.recording = recording;
    const { allocations, ranges, info } = recording;
    const { rests, released } = releases(ranges);
    this.released = released;
    // A block that waits for nothing is free with the event of its request in recordings that have only one.
    const waitsLonger = (at) => allocations.until[at] !== allocations.waits[at];
    const marks = Uint32Array.from(info.marks, (mark) => mark.position);
    const list = (positions, isListed) => ({ positions, items: sortedBy(positions, isListed) });
    // In the order of ACTIONS.
    const lists = [
      list(allocations.from),
      list(allocations.waits),
      list(allocations.until, waitsLonger),
      list(ranges.from, (at) => !rests.has(at)),
      list(ranges.until, (at) => released.has(at)),
      list(marks, (at) => info.marks[at].kind === "oom"),
      list(marks, (at) => info.marks[at].kind === "retry"),
    ];
    this.retries = lists[RETRY].items.length;
    this.count = lists.reduce((sum, { items }) => sum + items.length, 0);
    this.position = new Uint32Array(this.count);
    this.action = new Uint8Array(this.count);
    this.item = new Uint32Array(this.count);
    merge(lists, this);
  }

  /** The row of the last event that is not behind a position; -1 if there is none. */
  rowAt(position, list) {
    let [low, high] = [0, list.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.position[list[middle]] <= position) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }

  /** The numbers of the rows of an action (-1 is all) that a text is found in. */
  filtered(action, matches) {
    const list = new Uint32Array(this.count);
    let count = 0;
    for (let row = 0; row < this.count; row++) {
      if ((action < 0 || this.action[row] === action) && (!matches || matches(row))) list[count++] = row;
    }
    return list.subarray(0, count);
  }

  /** The block that a row is about; -1 if it is about none. */
  allocationOf(row) {
    return this.action[row] <= FREE_COMPLETED ? this.item[row] : -1;
  }

  /** Retries are inferred: a recording has no events for them. */
  isEvent(row) {
    return this.action[row] !== RETRY;
  }

  isRange(row) {
    return this.action[row] === RESERVED || this.action[row] === RELEASED;
  }

  bytesOf(row) {
    const { allocations, ranges, info } = this.recording;
    const item = this.item[row];
    if (this.allocationOf(row) >= 0) return allocations.requested[item];
    if (!this.isRange(row)) return info.marks[item].bytes;
    return this.action[row] === RELEASED ? this.released.get(item).bytes : ranges.bytes[item];
  }

  addressOf(row) {
    const { allocations, ranges } = this.recording;
    if (this.allocationOf(row) >= 0) return allocations.addr[this.item[row]];
    if (this.action[row] === RELEASED) return this.released.get(this.item[row]).addr;
    return this.isRange(row) ? ranges.addr[this.item[row]] : null;
  }

  /** The stack of a row, from 1; 0 if it has none. */
  stackOf(row) {
    const { allocations, info } = this.recording;
    if (this.allocationOf(row) >= 0) return allocations.stack[this.item[row]];
    const stack = this.isRange(row) ? null : info.marks[this.item[row]].stack;
    return stack === null ? 0 : stack + 1;
  }

  /** Who: the call, and the line of the program. */
  textOf(row) {
    const { groups, stacks, info } = this.recording;
    const allocation = this.allocationOf(row);
    const stack = this.stackOf(row);
    const siteOfStack = stack ? stacks.sites[stacks.site[stack - 1]] : null;
    const site = allocation >= 0 ? groups.list[groups.of[allocation]] : siteOfStack;
    if (site) return site.line && site.line !== site.call ? `${site.call}, from ${site.line}` : site.call;
    return this.isRange(row) ? "" : markText(info.marks[this.item[row]]);
  }

  /** The stream and the pool, where the segment is known. */
  placeOf(row) {
    const { ranges } = this.recording;
    const range = this.isRange(row) ? this.item[row] : this.rangeAround(row);
    if (range < 0) return "";
    const [stream, pool] = [ranges.kinds.stream[ranges.kind[range]], ranges.kinds.pool[ranges.kind[range]]];
    const on = stream === 0 ? "default stream" : `stream 0x${stream.toString(16)}`;
    return pool === 0 ? on : `${on}, private pool`;
  }

  rangeAround(row) {
    const { ranges } = this.recording;
    const [addr, position] = [this.addressOf(row), this.position[row]];
    if (addr === null) return -1;
    // A range may end with the event that frees its last block, hence `>=`.
    for (let at = 0; at < ranges.count && ranges.from[at] <= position; at++) {
      const isInside = ranges.addr[at] <= addr && addr < ranges.addr[at] + ranges.bytes[at];
      if (isInside && ranges.until[at] >= position) return at;
    }
    return -1;
  }
}

/** The numbers of positions within the history, by position. `isListed` may leave out some. */
function sortedBy(positions, isListed = null) {
  const numbers = new Uint32Array(positions.length);
  let [count, last, isSorted] = [0, 0, true];
  for (let at = 0; at < positions.length; at++) {
    const position = positions[at];
    if (position === 0 || position === NEVER || (isListed && !isListed(at))) continue;
    if (position < last) isSorted = false;
    last = position;
    numbers[count++] = at;
  }
  const found = numbers.subarray(0, count);
  if (isSorted) return found;
  if (positions.length > 2 ** 21) return found.sort((a, b) => positions[a] - positions[b] || a - b);
  // A position and its number in one double (32 and 21 bits), since numbers sort fastest without a comparison.
  const keys = new Float64Array(count);
  for (let at = 0; at < count; at++) keys[at] = positions[found[at]] * 2 ** 21 + found[at];
  keys.sort();
  for (let at = 0; at < count; at++) found[at] = keys[at] % 2 ** 21;
  return found;
}

/** Puts sorted lists into one. Millions of rows go through here while the page opens. */
function merge(lists, rows) {
  const ends = lists.map(({ items }) => items.length);
  const next = new Uint32Array(lists.length);
  const head = Float64Array.from(lists, ({ positions, items }) => (items.length ? positions[items[0]] : Infinity));
  for (let row = 0; row < rows.count; row++) {
    let least = 0;
    for (let list = 1; list < head.length; list++) if (head[list] < head[least]) least = list;
    const { positions, items } = lists[least];
    rows.position[row] = head[least];
    rows.action[row] = least;
    rows.item[row] = items[next[least]++];
    head[least] = next[least] < ends[least] ? positions[items[next[least]]] : Infinity;
  }
}

/**
 * The releases, each once. An event may end several ranges, and of a range of which a part is released the rest begins
 * at the same position: `rests`. `released` has the address and the bytes of each event, by its first range.
 */
function releases(ranges) {
  const startsAt = new Map();
  for (let at = 0; at < ranges.count; at++) {
    if (!startsAt.has(ranges.from[at])) startsAt.set(ranges.from[at], []);
    startsAt.get(ranges.from[at]).push(at);
  }
  const [rests, released, firstAt] = [new Set(), new Map(), new Map()];
  for (let at = 0; at < ranges.count; at++) {
    const position = ranges.until[at];
    if (position === NEVER) continue;
    let [addr, bytes] = [ranges.addr[at], ranges.bytes[at]];
    const end = addr + bytes;
    for (const rest of startsAt.get(position) ?? []) {
      if (ranges.addr[rest] < ranges.addr[at] || ranges.addr[rest] >= end) continue;
      rests.add(rest);
      bytes -= ranges.bytes[rest];
      if (ranges.addr[rest] === addr) addr += ranges.bytes[rest];
    }
    const first = firstAt.get(position);
    if (first === undefined) {
      firstAt.set(position, at);
      released.set(at, { addr, bytes });
    } else {
      const event = released.get(first);
      event.addr = Math.min(event.addr, addr);
      event.bytes += bytes;
    }
  }
  return { rests, released };
}
