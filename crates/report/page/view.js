// What the reader looks at: the visible range, the cursor, and how things are coloured. Drawings listen to it.

/** Where the drawing area of every chart begins and ends, so that they share their horizontal axis. */
export const MARGIN = { left: 66, right: 12 };

/** Whether events are spread over time so that a chart by time shows them well: half of them in the middle half. */
function isEvenlySpread(recording) {
  const { duration_us: duration } = recording.info.figures;
  const middle = recording.timeOf(recording.events / 2) / duration;
  return duration > 0 && middle > 0.25 && middle < 0.75;
}

export class View {
  constructor(recording) {
    this.listeners = [];
    this.colourBy = "stack";
    this.stackBy = "part";
    this.pinned = null;
    this.showsAllFrames = false;
    this.search = null;
    this.open(recording);
  }

  /** Shows a recording from its start to its end, with the cursor at the moment that is explained. */
  open(recording) {
    this.recording = recording;
    this.axis = isEvenlySpread(recording) ? "time" : "events";
    this.cursor = recording.info.moment_position;
    [this.from, this.to] = this.whole;
    this.pinned = null;
    if (!recording.hasCategories) {
      this.stackBy = "part";
      if (this.colourBy === "category") this.colourBy = "stack";
    }
    this.changed("recording", "range", "cursor", "colour", "layers", "pin");
  }

  /**
   * Calls `listener()` after a change: `recording`, `range`, `cursor`, `colour`, `layers`, `search`, `frames` or `pin`.
   */
  listen(what, listener) {
    this.listeners.push({ what, listener });
  }

  changed(...what) {
    const called = new Set();
    for (const { what: wanted, listener } of this.listeners) {
      if (what.some((one) => wanted.includes(one)) && !called.has(listener)) {
        called.add(listener);
        listener();
      }
    }
  }

  /** The whole range, in units of the axis: microseconds or positions. */
  get whole() {
    const { events, info } = this.recording;
    return this.axis === "time" ? [0, Math.max(1, info.figures.duration_us)] : [0, Math.max(1, events)];
  }

  /** The smallest range that can be shown: a few events. */
  get smallest() {
    return this.axis === "time" ? 5 : 4;
  }

  unitOf(position) {
    return this.axis === "time" ? this.recording.timeOf(position) : position;
  }

  positionOf(unit) {
    return this.axis === "time" ? this.recording.positionAtTime(unit) : Math.round(unit);
  }

  /** Shows a range, within the whole. */
  show(from, to) {
    const [low, high] = this.whole;
    const size = Math.min(high - low, Math.max(this.smallest, to - from));
    const start = Math.min(high - size, Math.max(low, (from + to - size) / 2));
    [this.from, this.to] = [start, start + size];
    this.changed("range");
  }

  /** Shows less or more around a place. */
  zoom(factor, around = null) {
    const inside = this.unitOf(this.cursor);
    const centre = around ?? (inside >= this.from && inside <= this.to ? inside : (this.from + this.to) / 2);
    const start = centre - (centre - this.from) * factor;
    const size = Math.max(this.smallest, (this.to - this.from) * factor);
    this.show(start, start + size);
  }

  /** Shows what is beside: -1 is a whole width to the left. */
  pan(widths) {
    const by = (this.to - this.from) * widths;
    this.show(this.from + by, this.to + by);
  }

  reset() {
    this.show(...this.whole);
  }

  /** Moves the cursor; the visible range follows it. */
  moveCursor(position) {
    this.cursor = Math.min(this.recording.events, Math.max(0, position));
    const unit = this.unitOf(this.cursor);
    if (unit < this.from || unit > this.to) {
      const half = (this.to - this.from) / 2;
      this.show(unit - half, unit + half);
    }
    this.changed("cursor");
  }

  toggleAxis() {
    if (this.recording.info.figures.duration_us === 0) return;
    const [from, to] = [this.positionOf(this.from), this.positionOf(this.to)];
    const wasWhole = this.from <= this.whole[0] && this.to >= this.whole[1];
    this.axis = this.axis === "time" ? "events" : "time";
    if (wasWhole) this.reset();
    else this.show(this.unitOf(from), this.unitOf(to));
  }

  /** What blocks may be coloured by. */
  get colourings() {
    return this.recording.hasCategories ? ["stack", "category", "age"] : ["stack", "age"];
  }

  toggleColour() {
    const { colourings } = this;
    this.colourBy = colourings[(colourings.indexOf(this.colourBy) + 1) % colourings.length];
    this.changed("colour");
  }

  /** Memory over time by part, or by category where those are known. */
  toggleLayers() {
    if (!this.recording.hasCategories) return;
    this.stackBy = this.stackBy === "part" ? "category" : "part";
    this.changed("layers");
  }

  /** Shows the stack of something until it is unpinned; the cursor stays where it is. */
  pin(pinned) {
    this.pinned = pinned;
    this.changed("pin");
  }

  toggleFrames() {
    this.showsAllFrames = !this.showsAllFrames;
    this.changed("frames");
  }

  /** The horizontal place of a unit in a chart of a width. */
  x(unit, width) {
    return MARGIN.left + ((unit - this.from) / (this.to - this.from)) * (width - MARGIN.left - MARGIN.right);
  }

  /** And back. */
  unitAt(x, width) {
    return this.from + ((x - MARGIN.left) / (width - MARGIN.left - MARGIN.right)) * (this.to - this.from);
  }
}
