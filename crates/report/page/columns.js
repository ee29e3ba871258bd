// One value of each kind per pixel column of a chart, from the level of detail that fits its width.

import { upperBound } from "./recording.js";
import { MARGIN } from "./view.js";

/** The coarsest level that still has more buckets in a range than the chart has pixels. */
function fittingLevel(recording, axis, from, to, pixels) {
  const { levels } = recording;
  for (let at = levels.length - 1; at > 0; at--) {
    const key = axis === "time" ? levels[at].time : levels[at].position;
    const inside = upperBound(key, to, 0, levels[at].count) - upperBound(key, from, 0, levels[at].count);
    if (inside >= 1.5 * pixels) return levels[at];
  }
  return levels[0];
}

const columnsCache = new WeakMap();

/** The columns of a range; several drawings and the pointer ask for the same. */
export function pixelColumns(recording, { axis, from, to }, width) {
  const key = [axis, from, to, width].join(" ");
  if (!columnsCache.has(recording)) columnsCache.set(recording, new Map());
  const known = columnsCache.get(recording);
  if (!known.has(key)) {
    // A few: the visible range, the whole one, and those of the last moments.
    if (known.size >= 8) known.delete(known.keys().next().value);
    known.set(key, makeColumns(recording, { axis, from, to }, width));
  }
  return known.get(key);
}

/** The columns of a range: of all buckets in a pixel the one with the most live memory, and the extremes. */
function makeColumns(recording, { axis, from, to }, width) {
  const pixels = Math.max(1, Math.floor(width - MARGIN.left - MARGIN.right));
  const level = fittingLevel(recording, axis, from, to, pixels);
  const key = axis === "time" ? level.time : level.position;
  const columns = { pixels, level, bucket: new Int32Array(pixels), top: 0 };
  columns.liveMin = new Float64Array(pixels);
  columns.reservedMax = new Float64Array(pixels);
  const live = (at) => level.allocated[at] + level.rounding[at];
  let at = Math.max(0, upperBound(key, from, 0, level.count) - 1);
  let last = at;
  for (let pixel = 0; pixel < pixels; pixel++) {
    const end = from + ((pixel + 1) / pixels) * (to - from);
    let [best, min, reserved] = [-1, Infinity, 0];
    for (; at < level.count && key[at] <= end; at++) {
      if (best < 0 || live(at) > live(best)) best = at;
      min = Math.min(min, level.liveMin[at]);
      reserved = Math.max(reserved, level.reservedMax[at]);
      last = at;
    }
    // Without a bucket of its own a pixel has the state before it.
    columns.bucket[pixel] = best < 0 ? last : best;
    columns.liveMin[pixel] = best < 0 ? live(last) : min;
    columns.reservedMax[pixel] = best < 0 ? level.reserved[last] : reserved;
    columns.top = Math.max(columns.top, columns.reservedMax[pixel], live(columns.bucket[pixel]));
  }
  return columns;
}

/** The position that a pixel column shows. */
export function positionAtPixel(columns, pixel) {
  const at = Math.min(columns.pixels - 1, Math.max(0, Math.floor(pixel)));
  return columns.level.position[columns.bucket[at]];
}

/** Bytes of some allocations in every pixel column. */
export function bytesOverColumns(recording, columns, isCounted) {
  const { allocations } = recording;
  const positions = Float64Array.from(columns.bucket, (bucket) => columns.level.position[bucket]);
  const changes = new Float64Array(columns.pixels + 1);
  for (let at = 0; at < allocations.count; at++) {
    if (!isCounted[at]) continue;
    const first = upperBound(positions, allocations.from[at] - 1, 0, columns.pixels);
    const end = upperBound(positions, allocations.until[at] - 1, 0, columns.pixels);
    if (first >= end) continue;
    changes[first] += allocations.requested[at];
    changes[end] -= allocations.requested[at];
  }
  for (let pixel = 1; pixel < columns.pixels; pixel++) changes[pixel] += changes[pixel - 1];
  return changes;
}

/** The top of each layer in a bucket, from below. */
export function layerTops(layers, level, bucket) {
  let sum = 0;
  return layers.map(({ bytes }) => (sum += bytes(level, bucket)));
}
