// The segments and blocks at the cursor: all of reserved memory to one scale, in rows like the lines of a text, with
// one paragraph for each pool, stream and size class.

import { formatBytes, formatCount, formatShare } from "./format.js";
import { Surface, fitText, pointerIn } from "./canvas.js";
import { theme } from "./theme.js";
import { ageColour, blockColour } from "./colours.js";
import { hideTooltip, showTooltip } from "./tooltip.js";
import { allocationLines } from "./bands.js";

const MAP_ROW = 13;
const MAP_ROW_GAP = 3;
const MAP_LABEL = 19;
const MAP_HEIGHT_MAX = 380;

export class SegmentMap {
  constructor(canvas, view, onPin) {
    this.view = view;
    this.canvas = canvas;
    this.surface = new Surface(canvas, (...args) => this.draw(...args));
    this.surface.height = (width) => this.measure(width);
    view.listen(["recording", "cursor", "colour", "search", "pin"], () => this.surface.redraw());
    canvas.addEventListener("pointermove", (event) => this.hover(event));
    canvas.addEventListener("pointerleave", hideTooltip);
    canvas.addEventListener("click", (event) => {
      const found = this.find(pointerIn(event, canvas));
      if (found?.allocation >= 0) onPin(found.allocation);
    });
  }

  /** Chooses the scale so that everything has a place, and returns the height. */
  measure(width) {
    this.paragraphs = paragraphsAt(this.view.recording, this.view.cursor);
    const bytes = this.paragraphs.reduce((sum, paragraph) => sum + paragraph.bytes, 0);
    const labels = this.paragraphs.length * MAP_LABEL;
    const rows = Math.max(3, Math.floor((MAP_HEIGHT_MAX - labels) / (MAP_ROW + MAP_ROW_GAP)) - this.paragraphs.length);
    this.bytesPerRow = Math.max(2 ** 20, bytes / rows);
    const height = this.paragraphs.reduce((sum, { bytes: size }) => {
      return sum + MAP_LABEL + Math.max(1, Math.ceil(size / this.bytesPerRow)) * (MAP_ROW + MAP_ROW_GAP);
    }, 0);
    this.width = width;
    return Math.max(40, height);
  }

  draw(context, width) {
    const colours = theme();
    const { recording, cursor, colourBy, search, pinned } = this.view;
    const { allocations } = recording;
    this.places = [];
    if (this.paragraphs.length === 0) {
      context.font = colours.font;
      context.fillStyle = colours.muted;
      context.fillText("Nothing is reserved at the cursor.", 0, 20);
      return;
    }
    const oldest = Math.log1p(cursor);
    let top = 0;
    for (const paragraph of this.paragraphs) {
      context.font = colours.font;
      context.textAlign = "left";
      context.textBaseline = "alphabetic";
      context.fillStyle = colours.muted;
      context.fillText(fitText(context, paragraph.label, width), 0, top + 13);
      top += MAP_LABEL;
      let offset = 0;
      for (const piece of paragraph.pieces) {
        if (piece.allocation < 0) context.fillStyle = colours.free;
        else if (piece.isWaiting) context.fillStyle = colours.parts.waiting;
        else if (colourBy === "age") {
          const age = oldest > 0 ? Math.log1p(cursor - allocations.from[piece.allocation]) / oldest : 1;
          context.fillStyle = ageColour(age);
        } else context.fillStyle = blockColour(recording, colourBy, piece.allocation);
        const isDim = search && piece.allocation >= 0 && !search.matches[piece.allocation];
        context.globalAlpha = isDim ? 0.18 : 1;
        this.fill(context, top, offset, piece);
        offset += piece.bytes;
      }
      context.globalAlpha = 1;
      if (pinned?.allocation >= 0) this.outline(context, pinned.allocation);
      // The borders of segments.
      context.fillStyle = colours.gap;
      for (const start of paragraph.starts) {
        const row = Math.floor(start / this.bytesPerRow);
        const x = ((start - row * this.bytesPerRow) / this.bytesPerRow) * width;
        if (start > 0) context.fillRect(x - 0.5, top + row * (MAP_ROW + MAP_ROW_GAP), 1, MAP_ROW);
      }
      top += Math.max(1, Math.ceil(offset / this.bytesPerRow)) * (MAP_ROW + MAP_ROW_GAP);
    }
  }

  /** Fills a piece, which may go on in further rows. */
  fill(context, top, offset, piece) {
    const { bytesPerRow, width } = this;
    let [from, left] = [offset, piece.bytes];
    while (left > 0) {
      const row = Math.floor(from / bytesPerRow);
      const inRow = Math.min(left, (row + 1) * bytesPerRow - from);
      if (inRow <= 0) break;
      const x = ((from - row * bytesPerRow) / bytesPerRow) * width;
      const size = (inRow / bytesPerRow) * width;
      const y = top + row * (MAP_ROW + MAP_ROW_GAP);
      // A hair between blocks where there is room for it.
      context.fillRect(x, y, size > 3 ? size - 0.6 : size, MAP_ROW);
      this.places.push({ x, y, size, piece });
      from += inRow;
      left -= inRow;
    }
  }

  /** Shows where the pinned block is. */
  outline(context, allocation) {
    context.strokeStyle = theme().text;
    context.lineWidth = 2;
    for (const { x, y, size, piece } of this.places) {
      if (piece.allocation === allocation) context.strokeRect(x, y, Math.max(2, size), MAP_ROW);
    }
  }

  find({ x, y }) {
    const isInside = (place) =>
      y >= place.y && y < place.y + MAP_ROW && x >= place.x && x < place.x + Math.max(1, place.size);
    return this.places?.find(isInside)?.piece;
  }

  hover(event) {
    const piece = this.find(pointerIn(event, this.canvas));
    if (!piece) hideTooltip();
    else if (piece.allocation >= 0) {
      const lines = allocationLines(this.view.recording, piece.allocation);
      if (piece.isWaiting) lines.splice(1, 0, "freed, waits for streams");
      showTooltip(event, lines);
    } else showTooltip(event, [`${formatBytes(piece.bytes)} free`, `at 0x${piece.addr.toString(16)}`]);
  }
}

/** The name of a pool; the last number is one whose own number is not known. */
function poolName(pool) {
  if (pool === 0) return "default pool";
  return pool === 2 ** 32 - 1 ? "private pool" : `private pool ${pool}`;
}

/** The pieces of memory at a position, by pool, stream and size class, then by address. */
function paragraphsAt(recording, position) {
  const { ranges, allocations } = recording;
  const active = [...recording.activeAt(position)].sort((a, b) => allocations.addr[a] - allocations.addr[b]);
  const reserved = recording.rangesAt(position).sort((a, b) => ranges.addr[a] - ranges.addr[b]);
  const byKind = new Map();
  let next = 0;
  const strays = [];
  const pieceOf = (at) => ({
    allocation: at,
    addr: allocations.addr[at],
    bytes: allocations.bytes[at],
    isWaiting: allocations.waits[at] <= position,
  });
  for (const range of reserved) {
    const kind = ranges.kind[range];
    if (!byKind.has(kind)) byKind.set(kind, { kind, pieces: [], starts: [], bytes: 0, free: 0, segments: new Set() });
    const paragraph = byKind.get(kind);
    const [start, end] = [ranges.addr[range], ranges.addr[range] + ranges.bytes[range]];
    paragraph.segments.add(ranges.segment[range]);
    paragraph.starts.push(paragraph.bytes);
    paragraph.bytes += ranges.bytes[range];
    let at = start;
    const addFree = (to) => {
      if (to <= at) return;
      paragraph.pieces.push({ allocation: -1, addr: at, bytes: to - at });
      paragraph.free += to - at;
    };
    while (next < active.length && allocations.addr[active[next]] < start) strays.push(active[next++]);
    while (next < active.length && allocations.addr[active[next]] < end) {
      const piece = pieceOf(active[next++]);
      addFree(piece.addr);
      piece.bytes = Math.min(piece.bytes, end - Math.max(at, piece.addr));
      if (piece.bytes > 0) paragraph.pieces.push(piece);
      at = Math.max(at, piece.addr + piece.bytes);
    }
    addFree(end);
  }
  strays.push(...active.slice(next));
  const { stream, isLarge, pool } = ranges.kinds;
  const paragraphs = [...byKind.values()].sort((a, b) => b.bytes - a.bytes || a.kind - b.kind);
  for (const paragraph of paragraphs) {
    const { kind, bytes, free, segments } = paragraph;
    const where = poolName(pool[kind]);
    const on = stream[kind] === 0 ? "default stream" : `stream 0x${stream[kind].toString(16)}`;
    const count = segments.size === 1 ? "1 segment" : `${formatCount(segments.size)} segments`;
    paragraph.label =
      `${isLarge[kind] ? "large" : "small"} blocks, ${where}, ${on}: ${formatBytes(bytes)} in ${count}, ` +
      `${formatShare(free, bytes)} free`;
  }
  if (strays.length > 0) {
    const pieces = strays.map(pieceOf);
    const bytes = pieces.reduce((sum, piece) => sum + piece.bytes, 0);
    paragraphs.push({ pieces, starts: [], bytes, label: `in no recorded segment: ${formatBytes(bytes)}` });
  }
  return paragraphs;
}
