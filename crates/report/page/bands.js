// Allocations as bands: each is as high as its bytes and as long as it lives, and moves down when one below it is
// freed. The heaviest in the visible range are drawn one by one, the others as one band on top.

import { NEVER, eventName, upperBound } from "./recording.js";
import { formatBytes, formatCount, formatTime } from "./format.js";
import { MARGIN } from "./view.js";
import { pixelColumns } from "./columns.js";
import { RangePlot, drawByteAxis, drawMarks, drawTimeAxis } from "./timeline.js";
import { theme } from "./theme.js";
import { blockColour } from "./colours.js";

/** How many bands are drawn. */
const BANDS_MAX = 3000;
/** How many pixels wide a column of bands is. */
const STEP = 2;

export class BandsPlot extends RangePlot {
  constructor(element, view, note, onPin) {
    super(element, view, {
      draw: (...args) => this.drawBase(...args),
      describe: (x, y, width) => this.describeAt(x, y, width),
    });
    this.note = note;
    this.onPin = onPin;
    view.listen(["recording", "range", "search", "colour", "pin"], () => this.base.redraw());
  }

  drawBase(context, width, height) {
    const { view } = this;
    const { recording, search } = view;
    const layout = layOut(recording, pixelColumns(recording, view, width));
    const scale = drawByteAxis(context, width, height, layout.top * 1.04);
    const colours = theme();
    this.layout = layout;
    this.unscale = (y) => ((scale(0) - y) / Math.max(1, scale(0) - scale(layout.top))) * layout.top;
    // What is not drawn one by one, on top.
    context.fillStyle = colours.parts.cached;
    fillBand(context, scale, { first: 0, end: layout.columns }, layout.sum, layout.total);
    layout.bands.forEach((band) => {
      const isDim = search && !search.matches[band.allocation];
      context.fillStyle = blockColour(recording, view.colourBy, band.allocation);
      context.globalAlpha = isDim ? 0.15 : 1;
      fillBand(context, scale, band, band.bottom, null, recording.allocations.bytes[band.allocation]);
    });
    context.globalAlpha = 1;
    const pinned = view.pinned && layout.bands.find((band) => band.allocation === view.pinned.allocation);
    if (pinned) {
      context.fillStyle = colours.text;
      fillBand(context, scale, pinned, pinned.bottom, null, recording.allocations.bytes[pinned.allocation]);
    }
    drawMarks(context, width, height, view);
    drawTimeAxis(context, width, height, view);
    const isComplete = layout.candidates === layout.bands.length && recording.info.figures.allocations_left_out === 0;
    this.note.textContent =
      `the ${formatCount(layout.bands.length)} heaviest that are visible in this range` +
      (isComplete ? "" : "; the others are the grey band on top");
  }

  bandAt(x, y) {
    const column = Math.floor((x - MARGIN.left) / STEP);
    const bytes = this.unscale(y);
    const { bands } = this.layout;
    const height = (band) => this.view.recording.allocations.bytes[band.allocation];
    return bands.find((band) => {
      if (column < band.first || column >= band.end) return false;
      const bottom = band.bottom[column - band.first];
      return bytes >= bottom && bytes < bottom + height(band);
    });
  }

  /** A click on a band pins its stack, and leaves the cursor where it is. */
  choose({ x, y }) {
    const band = x >= MARGIN.left && this.layout ? this.bandAt(x, y) : null;
    if (band) this.onPin(band.allocation);
    return Boolean(band);
  }

  describeAt(x, y) {
    if (x < MARGIN.left || !this.layout) return null;
    const band = this.bandAt(x, y);
    return band ? allocationLines(this.view.recording, band.allocation) : null;
  }
}

/** An allocation in words. */
export function allocationLines(recording, at) {
  const { allocations, groups } = recording;
  const { bytes, requested, from, until } = allocations;
  const rounding = bytes[at] - requested[at];
  const start = from[at] === 0 ? "before the history" : `at ${eventName(from[at])}`;
  const lives = until[at] === NEVER
    ? `allocated ${start}, never freed`
    : `allocated ${start}, free at ${eventName(until[at])} (${formatTime(
        recording.timeOf(until[at]) - recording.timeOf(from[at]),
      )})`;
  const group = groups.list[groups.of[at]];
  const stack = recording.shortStack(allocations.stack[at]);
  return [
    `${formatBytes(requested[at])}${rounding > 0 ? ` + ${formatBytes(rounding)} rounding` : ""}`,
    stack.length ? null : group.call,
    recording.hasCategories && recording.categories[allocations.category[at]].label,
    `at 0x${allocations.addr[at].toString(16)}`,
    lives,
    ...recording.contextLines(from[at]),
    ...stack,
  ];
}

/** Where each band is: its columns, and its bottom in each. */
function layOut(recording, pixels) {
  const { allocations } = recording;
  const columns = Math.max(1, Math.floor(pixels.pixels / STEP));
  const { level } = pixels;
  const live = (bucket) => level.allocated[bucket] + level.rounding[bucket] + level.waiting[bucket];
  const positions = new Float64Array(columns);
  const total = new Float64Array(columns);
  let top = 0;
  for (let column = 0; column < columns; column++) {
    // Of the pixels of a column the one with the most live memory, so that no peak is missed.
    let best = pixels.bucket[column * STEP];
    for (let pixel = column * STEP + 1; pixel < (column + 1) * STEP; pixel++) {
      if (live(pixels.bucket[pixel]) > live(best)) best = pixels.bucket[pixel];
    }
    positions[column] = level.position[best];
    total[column] = live(best);
    top = Math.max(top, total[column]);
  }
  // Those that exist in at least one column, and what they take in the drawing.
  const [visible, firsts, ends, weights] = [[], [], [], []];
  for (let at = 0; at < allocations.count && allocations.from[at] <= positions[columns - 1]; at++) {
    // What is far less than a pixel high cannot be seen.
    if (allocations.until[at] <= positions[0] || allocations.bytes[at] * 4000 < top) continue;
    const first = upperBound(positions, allocations.from[at] - 1, 0, columns);
    const last = upperBound(positions, allocations.until[at] - 1, first, columns);
    if (first >= last) continue;
    visible.push(at);
    firsts.push(first);
    ends.push(last);
    weights.push(allocations.bytes[at] * (last - first));
  }
  const least = nthLargest(weights, BANDS_MAX);
  const sum = new Float64Array(columns);
  const bands = [];
  // In the order of allocation: what lives long is below.
  visible.forEach((allocation, at) => {
    if (weights[at] < least || bands.length >= BANDS_MAX) return;
    const [first, last] = [firsts[at], ends[at]];
    const bottom = sum.slice(first, last);
    const bytes = allocations.bytes[allocation];
    for (let column = first; column < last; column++) sum[column] += bytes;
    bands.push({ allocation, first, end: last, bottom });
  });
  return { columns, bands, sum, total, top, candidates: visible.length };
}

/** The least of the `count` largest values. */
function nthLargest(values, count) {
  if (values.length <= count) return 0;
  const sorted = Float64Array.from(values).sort();
  return sorted[sorted.length - count];
}

/** Fills between `bottom` and `top`, or a constant height above it. */
function fillBand(context, scale, { first, end }, bottom, top, height = 0) {
  const x = (column) => MARGIN.left + column * STEP;
  const upper = (at) => scale(top ? top[at] : bottom[at] + height);
  // Within a run of equal heights one line is enough.
  const isWithinRun = (at) => !top && bottom[at] === bottom[at - 1] && bottom[at] === bottom[at + 1];
  context.beginPath();
  for (let at = 0; at < end - first; at++) {
    if (isWithinRun(at)) continue;
    context.lineTo(x(first + at), upper(at));
    context.lineTo(x(first + at + 1), upper(at));
  }
  for (let at = end - first - 1; at >= 0; at--) {
    if (isWithinRun(at)) continue;
    context.lineTo(x(first + at + 1), scale(bottom[at]));
    context.lineTo(x(first + at), scale(bottom[at]));
  }
  context.fill();
}
