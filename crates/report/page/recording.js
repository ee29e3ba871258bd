// One device of a recording: what was allocated and reserved at every position, and by whom.
// A position counts events: 0 is before the first. The state at a position needs no replay: an allocation exists from
// one position to another, so the active ones are found by one pass over two columns.

import { ColumnReader } from "./decode.js";
import { formatBytes, formatCount } from "./format.js";

/** Never freed. */
export const NEVER = 2 ** 32 - 1;

/** The parts of reserved memory, from below in the drawing. */
export const PARTS = [
  { name: "allocated", label: "requested", help: "bytes that the program requested and has not freed" },
  { name: "rounding", label: "rounding", help: "what blocks have beyond their requests; PyTorch counts it too" },
  { name: "waiting", label: "waiting for streams", help: "freed, but a stream may still use it" },
  { name: "fragmentation", label: "fragmentation", help: "free between allocations; cannot go back to the driver" },
  { name: "cached", label: "cached", help: "free segments; empty_cache() would give them back to the driver" },
];

export class Recording {
  /** Decodes the sections of a device. */
  static async open(device) {
    const recording = new Recording();
    recording.info = device;
    const categories = device.categories.length;
    const [levels, allocations, ranges, stacks, regions, contexts] = await Promise.all([
      Promise.all(device.levels.map((level) => openLevel(level, categories))),
      ColumnReader.open(`${device.id}.allocations`).then((reader) => readAllocations(reader, categories)),
      ColumnReader.open(`${device.id}.ranges`).then(readRanges),
      ColumnReader.open(`${device.id}.stacks`).then(readStacks),
      ColumnReader.open(`${device.id}.regions`).then(readRegions),
      ColumnReader.open(`${device.id}.contexts`).then(readContexts),
    ]);
    Object.assign(recording, { levels, allocations, ranges, stacks, regions, contexts });
    recording.groups = makeGroups(recording);
    return recording;
  }

  /** The number of positions is one more. */
  get events() {
    return this.info.events;
  }

  /** Whether the sample at a position is exact: in long recordings the finest level has several positions in one. */
  get isExact() {
    return this.levels[0].positions === 1;
  }

  /** The kinds of memory, each with `name` and `label`; none if the recording does not tell. */
  get categories() {
    return this.info.categories;
  }

  get hasCategories() {
    return this.categories.length > 0;
  }

  /** The texts that the program had set at an event, as lines. */
  contextLines(position) {
    const { contexts } = this;
    const at = upperBound(contexts.position, position, 0, contexts.position.length) - 1;
    if (at < 0) return [];
    const text = (numbers) => (numbers[at] ? contexts.texts[numbers[at] - 1] : "");
    const [metadata, compiled] = [text(contexts.metadata), text(contexts.compiled)];
    return [metadata && `metadata: ${metadata}`, compiled && `compiled region: ${compiled}`].filter(Boolean);
  }

  /** The bucket of the finest level that a position is in. */
  bucketAt(position) {
    const level = this.levels[0];
    return Math.min(level.count - 1, Math.floor(position / level.positions));
  }

  /** The parts at a position. */
  sampleAt(position) {
    return sampleOf(this.levels[0], this.bucketAt(position));
  }

  /** The time of a position, in microseconds since the first event. */
  timeOf(position) {
    return this.levels[0].time[this.bucketAt(position)];
  }

  /** The last position that is not later than a time. */
  positionAtTime(us) {
    const level = this.levels[0];
    return level.position[Math.max(0, upperBound(level.time, us, 0, level.count) - 1)];
  }

  /** The allocations that are allocated, or wait for streams, at a position; by number. */
  activeAt(position) {
    // Several drawings ask for the same position.
    if (this.active?.position !== position) {
      const { from, until, count } = this.allocations;
      const started = upperBound(from, position, 0, count);
      const list = [];
      for (let at = 0; at < started; at++) if (until[at] > position) list.push(at);
      this.active = { position, list };
    }
    return this.active.list;
  }

  /** What is reserved at a position, by number. */
  rangesAt(position) {
    const { from, until, count } = this.ranges;
    const found = [];
    for (let at = 0; at < count && from[at] <= position; at++) if (until[at] > position) found.push(at);
    return found;
  }

  /** The event behind which a position is, in words. */
  eventAt(position) {
    const { from, waits, until, requested } = this.allocations;
    const first = upperBound(from, position - 1, 0, this.allocations.count);
    if (position > 0 && from[first] === position) {
      return { text: `allocated ${formatBytes(requested[first])}`, allocation: first };
    }
    for (let at = 0; at < first; at++) {
      if (until[at] === position || waits[at] === position) {
        return { text: `freed ${formatBytes(requested[at])}`, allocation: at };
      }
    }
    const range = position > 0 ? this.ranges.from.indexOf(position) : -1;
    if (range >= 0) return { text: `reserved ${formatBytes(this.ranges.bytes[range])}` };
    const mark = this.info.marks.find((candidate) => candidate.position === position);
    if (mark) return { text: markText(mark) };
    return { text: "" };
  }

  /** The frames of an allocation, innermost first. */
  framesOf(allocation) {
    return this.framesOfStack(this.allocations.stack[allocation]);
  }

  /** The frames of a stack, innermost first; 0 is no stack. */
  framesOfStack(stack) {
    const frames = [];
    for (let node = stack ? this.stacks.node[stack - 1] : -1; node >= 0; node = this.stacks.parent[node]) {
      frames.push(this.stacks.frame[node]);
    }
    return frames;
  }

  /** Frames that tell a reader something: Python lines, or the native ones if there are no others. */
  readable(frames) {
    const { passesThrough, isPython } = this.stacks;
    const telling = frames.filter((frame) => !passesThrough[frame]);
    const python = telling.filter((frame) => isPython[frame]);
    return [python, telling, frames].find((list) => list.length > 0) ?? [];
  }

  /** A few lines of a stack for a tooltip. */
  shortStack(stack, max = 8) {
    const frames = this.readable(this.framesOfStack(stack));
    const lines = frames.slice(0, max).map((frame) => this.stacks.frameText[frame]);
    if (frames.length > max) lines.push(`… and ${frames.length - max} more; a click pins all`);
    return lines;
  }
}

/** The event that led to a position; events are counted from 0, as `warpool explain` does. */
export function eventName(position) {
  return position > 0 ? `event ${formatCount(position - 1)}` : "before the first event";
}

/** A mark in words. */
export function markText(mark) {
  return mark.kind === "oom"
    ? `out of memory: ${formatBytes(mark.bytes)} requested`
    : `retry: ${formatBytes(mark.bytes)} of cached memory returned to the driver`;
}

/** The first place from which on values are larger. */
export function upperBound(values, value, low, high) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The parts of one bucket. */
export function sampleOf(level, at) {
  const sample = { position: level.position[at], time: level.time[at], reserved: level.reserved[at] };
  for (const { name } of PARTS) sample[name] = level[name][at];
  sample.live = sample.allocated + sample.rounding;
  return sample;
}

async function openLevel(info, categories) {
  const reader = await ColumnReader.open(info.id);
  const level = { positions: info.positions };
  level.time = reader.sums();
  level.allocated = reader.sums();
  level.rounding = reader.sums();
  level.waiting = reader.sums();
  level.cached = reader.sums();
  level.reserved = reader.sums();
  level.count = level.time.length;
  level.position = new Float64Array(level.count);
  level.fragmentation = new Float64Array(level.count);
  const offsets = reader.column(Uint32Array);
  const below = reader.column();
  const above = reader.column();
  level.liveMin = new Float64Array(level.count);
  level.reservedMax = new Float64Array(level.count);
  for (let at = 0; at < level.count; at++) {
    const live = level.allocated[at] + level.rounding[at];
    level.position[at] = at * level.positions + (offsets.length ? offsets[at] : 0);
    level.fragmentation[at] = Math.max(0, level.reserved[at] - live - level.waiting[at] - level.cached[at]);
    level.liveMin[at] = live - (below.length ? below[at] : 0);
    level.reservedMax[at] = level.reserved[at] + (above.length ? above[at] : 0);
  }
  level.categories = Array.from({ length: categories }, () => reader.sums());
  return level;
}

function readAllocations(reader, categories) {
  const sizes = [reader.column(), reader.column()];
  const from = reader.sums(Uint32Array);
  const count = from.length;
  const waitsAfter = reader.column();
  const freeAfter = reader.column();
  const addr = reader.sums();
  const size = reader.column(Uint32Array);
  const stack = reader.column(Uint32Array);
  const category = categories > 0 ? reader.column(Uint8Array) : new Uint8Array(0);
  const [waits, until] = [new Uint32Array(count), new Uint32Array(count)];
  const [bytes, requested] = [new Float64Array(count), new Float64Array(count)];
  for (let at = 0; at < count; at++) {
    // 0 is never; otherwise one more than the distance.
    waits[at] = waitsAfter[at] ? from[at] + waitsAfter[at] - 1 : NEVER;
    until[at] = freeAfter[at] ? waits[at] + freeAfter[at] - 1 : NEVER;
    bytes[at] = sizes[0][size[at]];
    requested[at] = sizes[1][size[at]];
  }
  return { count, from, waits, until, addr, bytes, requested, stack, category };
}

function readRanges(reader) {
  const kinds = [reader.column(), reader.column(), reader.column()];
  const from = reader.sums(Uint32Array);
  const life = reader.column();
  const addr = reader.sums();
  const bytes = reader.column();
  const kind = reader.column(Uint32Array);
  const segment = reader.sums(Uint32Array);
  const until = new Uint32Array(from.length);
  for (let at = 0; at < from.length; at++) until[at] = life[at] ? from[at] + life[at] : NEVER;
  const [stream, isLarge, pool] = kinds;
  return { count: from.length, from, until, addr, bytes, kind, segment, kinds: { stream, isLarge, pool } };
}

function readRegions(reader) {
  const from = reader.sums();
  const positions = reader.column();
  const fromTime = reader.sums();
  const times = reader.column();
  const [row, open, name] = [reader.column(Uint8Array), reader.column(Uint8Array), reader.column(Uint32Array)];
  const names = reader.json();
  return {
    count: from.length,
    from,
    until: Float64Array.from(from, (start, at) => start + positions[at]),
    fromTime,
    untilTime: Float64Array.from(fromTime, (start, at) => start + times[at]),
    row,
    rows: row.reduce((most, one) => Math.max(most, one + 1), 0),
    hasStart: (at) => (open[at] & 1) === 0,
    hasEnd: (at) => (open[at] & 2) === 0,
    nameOf: (at) => names[name[at]],
  };
}

function readContexts(reader) {
  const position = reader.sums();
  const [metadata, compiled] = [reader.column(Uint32Array), reader.column(Uint32Array)];
  return { position, metadata, compiled, texts: reader.json() };
}

function readStacks(reader) {
  const parents = reader.column();
  const parent = Int32Array.from(parents, (value) => value - 1);
  const frame = reader.column(Uint32Array);
  const [name, file, line, flags] = [reader.column(), reader.column(), reader.column(), reader.column()];
  const [siteCall, siteLine] = [reader.column(), reader.column()];
  const [node, site] = [reader.column(Uint32Array), reader.column(Uint32Array)];
  const texts = reader.json();
  const isPython = Array.from(file, (text) => /\.pyx?$|^<.*>$/.test(texts[text]));
  const hasPython = isPython.includes(true);
  const isFramework = Array.from(flags, (bits) => (bits & 2) !== 0);
  const frameText = Array.from(name, (text, at) => `${texts[text]} (${texts[file[at]]}:${line[at]})`);
  return {
    parent,
    frame,
    node,
    site,
    frameText,
    frameName: Array.from(name, (text) => texts[text]),
    /** It only calls on. */
    passesThrough: Array.from(flags, (bits) => (bits & 1) !== 0),
    isPython,
    /** The program's own code: what is native in a Python program is a part of the framework. */
    isOwn: isPython.map((python, at) => !isFramework[at] && (python || !hasPython)),
    sites: Array.from(siteCall, (call, at) => ({ call: texts[call], line: texts[siteLine[at]] })),
  };
}

/**
 * Groups of allocations: by what their stacks tell, or without a stack by size. Their ranks, which give their colours,
 * go by what they hold at the moment that is explained, and then by bytes and time.
 */
function makeGroups(recording) {
  const { allocations, stacks, info } = recording;
  const groups = stacks.sites.map(({ call, line }) => ({ call, line, held: 0, weight: 0 }));
  const moment = info.moment_position;
  const [bySize, byLabel] = [new Map(), new Map()];
  const of = new Uint32Array(allocations.count);
  for (let at = 0; at < allocations.count; at++) {
    const stack = allocations.stack[at];
    let group = stack ? stacks.site[stack - 1] : bySize.get(allocations.requested[at]);
    if (group === undefined) {
      // Sizes with the same text are one group, as in `warpool explain`.
      const call = `blocks of ${formatBytes(allocations.requested[at])}`;
      group = byLabel.get(call) ?? groups.length;
      bySize.set(allocations.requested[at], group);
      byLabel.set(call, group);
      if (group === groups.length) groups.push({ call, line: "", held: 0, weight: 0 });
    }
    of[at] = group;
    const until = Math.min(allocations.until[at], info.events + 1);
    groups[group].weight += allocations.requested[at] * (until - allocations.from[at]);
    if (allocations.from[at] <= moment && moment < until) groups[group].held += allocations.requested[at];
  }
  const ranked = [...groups].sort((a, b) => b.held - a.held || b.weight - a.weight);
  ranked.forEach((group, rank) => (group.rank = rank));
  return { list: groups, of };
}
