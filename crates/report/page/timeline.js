// Memory over time: the parts of what is reserved as areas, marks, the cursor; an overview of the whole above it.

import { eventName, markText, sampleOf } from "./recording.js";
import { axisTime, byteTicks, formatBytes, formatCount, formatTime, roundTicks } from "./format.js";
import { Surface, pointerIn } from "./canvas.js";
import { MARGIN } from "./view.js";
import { bytesOverColumns, layerTops, pixelColumns, positionAtPixel } from "./columns.js";
import { layersOf } from "./layers.js";
import { theme } from "./theme.js";
import { hideTooltip, showTooltip } from "./tooltip.js";

const BOTTOM = 22;
const TOP = 8;

/** The grid and the labels of bytes; returns the scale. */
export function drawByteAxis(context, width, height, top, bottom = BOTTOM) {
  const colours = theme();
  const scale = (bytes) => height - bottom - (bytes / Math.max(1, top)) * (height - bottom - TOP);
  context.font = colours.font;
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const tick of byteTicks(top, Math.max(2, (height - bottom) / 44))) {
    const y = Math.round(scale(tick)) + 0.5;
    context.fillStyle = colours.grid;
    context.fillRect(MARGIN.left, y - 0.5, width - MARGIN.left - MARGIN.right, 1);
    context.fillStyle = colours.muted;
    context.fillText(formatBytes(tick), MARGIN.left - 8, y);
  }
  return scale;
}

/** The labels of time or events. */
export function drawTimeAxis(context, width, height, view) {
  const colours = theme();
  const { ticks, step } = roundTicks(view.from, view.to, Math.max(2, (width - MARGIN.left) / 110));
  context.font = colours.font;
  context.fillStyle = colours.muted;
  context.textAlign = "center";
  context.textBaseline = "alphabetic";
  for (const tick of ticks) {
    const x = view.x(tick, width);
    if (x < MARGIN.left + 4 || x > width - 28) continue;
    context.fillStyle = colours.grid;
    context.fillRect(Math.round(x), height - BOTTOM, 1, 4);
    context.fillStyle = colours.muted;
    context.fillText(view.axis === "time" ? axisTime(tick, step, view.to) : formatCount(tick), x, height - 6);
  }
}

/** The areas of a range of columns, and the line of what is reserved. */
export function drawAreas(context, columns, scale, layers) {
  const colours = theme();
  const { level, bucket, pixels } = columns;
  const tops = Array.from(bucket, (at) => layerTops(layers, level, at));
  for (let layer = layers.length - 1; layer >= 0; layer--) {
    context.fillStyle = layers[layer].colour;
    context.beginPath();
    context.moveTo(MARGIN.left, scale(0));
    for (let pixel = 0; pixel < pixels; pixel++) {
      const y = scale(tops[pixel][layer]);
      context.lineTo(MARGIN.left + pixel, y);
      context.lineTo(MARGIN.left + pixel + 1, y);
    }
    context.lineTo(MARGIN.left + pixels, scale(0));
    context.fill();
  }
  // Where several events share a pixel, live memory was also less than drawn: that part is lighter.
  context.fillStyle = colours.surface;
  context.globalAlpha = 0.35;
  for (let pixel = 0; pixel < pixels; pixel++) {
    const [low, high] = [columns.liveMin[pixel], level.allocated[bucket[pixel]] + level.rounding[bucket[pixel]]];
    if (high > low) context.fillRect(MARGIN.left + pixel, scale(high), 1, scale(low) - scale(high));
  }
  context.globalAlpha = 1;
  context.strokeStyle = colours.text;
  context.lineWidth = 1.25;
  context.beginPath();
  for (let pixel = 0; pixel < pixels; pixel++) {
    const y = scale(columns.reservedMax[pixel]);
    context.lineTo(MARGIN.left + pixel, y);
    context.lineTo(MARGIN.left + pixel + 1, y);
  }
  context.stroke();
}

/** Out-of-memory events and retries. */
export function drawMarks(context, width, height, view, bottom = BOTTOM) {
  const colours = theme();
  for (const mark of view.recording.info.marks) {
    const x = view.x(view.unitOf(mark.position), width);
    if (x < MARGIN.left - 1 || x > width - MARGIN.right + 1) continue;
    const isOom = mark.kind === "oom";
    context.fillStyle = isOom ? colours.oom : colours.retry;
    context.fillRect(Math.round(x) - 0.5, TOP, isOom ? 1.5 : 1, height - bottom - TOP);
    context.beginPath();
    context.moveTo(x - 5, 0);
    context.lineTo(x + 5, 0);
    context.lineTo(x, TOP);
    context.fill();
  }
}

/** A chart over the visible range: brush to zoom, click to set the cursor, a line at both. */
export class RangePlot {
  constructor(element, view, { draw, describe }) {
    this.element = element;
    this.view = view;
    this.describe = describe;
    this.hover = null;
    this.brush = null;
    this.base = new Surface(element.querySelector(".base"), draw);
    this.over = new Surface(element.querySelector(".over"), (...args) => this.drawOver(...args));
    view.listen(["cursor", "range"], () => this.over.redraw());
    element.addEventListener("pointerdown", (event) => this.press(event));
    element.addEventListener("pointermove", (event) => this.move(event));
    element.addEventListener("pointerup", (event) => this.release(event));
    element.addEventListener("pointercancel", () => this.cancel());
    element.addEventListener("pointerleave", () => this.cancel());
    element.addEventListener("dblclick", () => view.reset());
    element.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
  }

  redraw() {
    this.base.redraw();
    this.over.redraw();
  }

  get width() {
    return this.element.clientWidth;
  }

  press(event) {
    if (event.button !== 0) return;
    this.pressed = pointerIn(event, this.element);
    this.element.setPointerCapture(event.pointerId);
  }

  move(event) {
    const at = pointerIn(event, this.element);
    if (this.pressed && Math.abs(at.x - this.pressed.x) > 4) {
      this.brush = [this.pressed.x, at.x].sort((a, b) => a - b);
      hideTooltip();
    } else {
      const lines = this.describe(at.x, at.y, this.width);
      if (lines) showTooltip(event, lines);
      else hideTooltip();
    }
    this.hover = at.x;
    this.over.redraw();
  }

  release(event) {
    const at = pointerIn(event, this.element);
    const { view, brush, width } = this;
    if (brush) view.show(view.unitAt(Math.max(MARGIN.left, brush[0]), width), view.unitAt(brush[1], width));
    else if (this.pressed && !this.choose(at)) view.moveCursor(this.positionAt(at.x));
    this.pressed = this.brush = null;
    this.over.redraw();
  }

  /** Whether a click chose something that is drawn there, and so does not move the cursor. */
  choose() {
    return false;
  }

  cancel() {
    this.hover = this.brush = this.pressed = null;
    hideTooltip();
    this.over.redraw();
  }

  /** With Ctrl (or a pinch) it zooms, with Shift or sideways it pans; otherwise the page scrolls. */
  wheel(event) {
    const { view, width } = this;
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      view.zoom(Math.exp(event.deltaY * 0.004), view.unitAt(pointerIn(event, this.element).x, width));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      view.pan((event.deltaX || event.deltaY) / width);
    }
  }

  /** The position of a place: of the events in a pixel the one with the most live memory. */
  positionAt(x) {
    return positionAtPixel(pixelColumns(this.view.recording, this.view, this.width), x - MARGIN.left);
  }

  drawOver(context, width, height) {
    const { view, hover, brush } = this;
    const colours = theme();
    if (brush) {
      context.fillStyle = colours.accent;
      context.globalAlpha = 0.18;
      context.fillRect(brush[0], 0, brush[1] - brush[0], height - BOTTOM);
      context.globalAlpha = 1;
    } else if (hover !== null && hover > MARGIN.left) {
      context.fillStyle = colours.muted;
      context.globalAlpha = 0.5;
      context.fillRect(Math.round(hover), 0, 1, height - BOTTOM);
      context.globalAlpha = 1;
    }
    const x = view.x(view.unitOf(view.cursor), width);
    if (x < MARGIN.left - 1 || x > width - MARGIN.right + 1) return;
    context.fillStyle = colours.accent;
    context.fillRect(Math.round(x) - 1, 0, 2, height - BOTTOM);
    context.beginPath();
    context.arc(Math.round(x), height - BOTTOM, 4, 0, 7);
    context.fill();
  }
}

/** The chart of the parts. */
export class TimelinePlot extends RangePlot {
  constructor(element, view) {
    super(element, view, {
      draw: (...args) => this.drawBase(...args),
      describe: (x, y, width) => this.describeAt(x, width),
    });
    view.listen(["recording", "range", "search", "layers"], () => this.base.redraw());
  }

  drawBase(context, width, height) {
    const { view } = this;
    const columns = pixelColumns(view.recording, view, width);
    const scale = drawByteAxis(context, width, height, columns.top * 1.04);
    drawAreas(context, columns, scale, layersOf(view.recording, view.stackBy));
    if (view.search) this.drawFound(context, columns, scale);
    drawMarks(context, width, height, view);
    drawTimeAxis(context, width, height, view);
  }

  /** What the search finds, over time. */
  drawFound(context, columns, scale) {
    const bytes = bytesOverColumns(this.view.recording, columns, this.view.search.matches);
    context.strokeStyle = theme().match;
    context.lineWidth = 2;
    context.beginPath();
    for (let pixel = 0; pixel < columns.pixels; pixel++) {
      context.lineTo(MARGIN.left + pixel, scale(bytes[pixel]));
      context.lineTo(MARGIN.left + pixel + 1, scale(bytes[pixel]));
    }
    context.stroke();
  }

  describeAt(x, width) {
    const { view } = this;
    if (x < MARGIN.left) return null;
    const near = view.recording.info.marks.find(
      (mark) => Math.abs(view.x(view.unitOf(mark.position), width) - x) < 4,
    );
    const columns = pixelColumns(view.recording, view, width);
    const pixel = Math.min(columns.pixels - 1, Math.max(0, Math.floor(x - MARGIN.left)));
    const bucket = columns.bucket[pixel];
    const sample = sampleOf(columns.level, bucket);
    const { level } = columns;
    const layers = layersOf(view.recording, view.stackBy).map(({ label, bytes }) => [label, bytes(level, bucket)]);
    return [
      `${formatBytes(sample.live)} allocated, ${formatBytes(sample.reserved)} reserved`,
      near && markText(near),
      ...layers.filter(([, bytes]) => bytes > 0).map(([label, bytes]) => `${label}: ${formatBytes(bytes)}`),
      `${formatTime(sample.time)}, ${eventName(sample.position)}`,
      ...view.recording.contextLines(sample.position),
    ];
  }
}

/** The whole recording in a strip, with the visible range: drag it, its edges, or a new one. */
export class Overview {
  constructor(canvas, view) {
    this.canvas = canvas;
    this.view = view;
    this.surface = new Surface(canvas, (...args) => this.draw(...args));
    this.drag = null;
    view.listen(["recording", "range", "cursor"], () => this.surface.redraw());
    canvas.addEventListener("pointerdown", (event) => this.press(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", () => (this.drag = null));
    canvas.addEventListener("pointercancel", () => (this.drag = null));
    canvas.addEventListener("dblclick", () => view.reset());
  }

  get whole() {
    const [from, to] = this.view.whole;
    return { axis: this.view.axis, from, to };
  }

  x(unit, width) {
    const { from, to } = this.whole;
    return MARGIN.left + ((unit - from) / (to - from)) * (width - MARGIN.left - MARGIN.right);
  }

  unitAt(x) {
    const { from, to } = this.whole;
    const width = this.canvas.clientWidth;
    return from + ((x - MARGIN.left) / (width - MARGIN.left - MARGIN.right)) * (to - from);
  }

  draw(context, width, height) {
    const { view } = this;
    const colours = theme();
    const columns = pixelColumns(view.recording, this.whole, width);
    const scale = (bytes) => height - 1 - (bytes / Math.max(1, columns.top)) * (height - 4);
    for (let pixel = 0; pixel < columns.pixels; pixel++) {
      const bucket = columns.bucket[pixel];
      const live = columns.level.allocated[bucket] + columns.level.rounding[bucket];
      const x = MARGIN.left + pixel;
      context.fillStyle = colours.parts.cached;
      context.fillRect(x, scale(columns.reservedMax[pixel]), 1, height);
      context.fillStyle = colours.parts.allocated;
      context.fillRect(x, scale(live), 1, height);
    }
    const [left, right] = [this.x(view.from, width), this.x(view.to, width)];
    context.fillStyle = colours.surface;
    context.globalAlpha = 0.7;
    context.fillRect(MARGIN.left, 0, left - MARGIN.left, height);
    context.fillRect(right, 0, width - MARGIN.right - right, height);
    context.globalAlpha = 1;
    context.strokeStyle = colours.accent;
    context.lineWidth = 1;
    context.strokeRect(left + 0.5, 0.5, Math.max(2, right - left - 1), height - 1);
    context.fillStyle = colours.accent;
    for (const x of [left, right]) context.fillRect(x - 2, height / 2 - 8, 4, 16);
    context.fillRect(Math.round(this.x(view.unitOf(view.cursor), width)) - 1, 0, 2, height);
  }

  press(event) {
    const { x } = pointerIn(event, this.canvas);
    const width = this.canvas.clientWidth;
    const [left, right] = [this.x(this.view.from, width), this.x(this.view.to, width)];
    this.canvas.setPointerCapture(event.pointerId);
    const [from, to] = [this.view.from, this.view.to];
    if (Math.abs(x - left) < 6) this.drag = { kind: "left", to };
    else if (Math.abs(x - right) < 6) this.drag = { kind: "right", from };
    else if (x > left && x < right && right - left < width - MARGIN.left - MARGIN.right - 4) {
      this.drag = { kind: "pan", unit: this.unitAt(x), from, to };
    } else this.drag = { kind: "new", unit: this.unitAt(x) };
  }

  move(event) {
    if (!this.drag) return;
    const unit = this.unitAt(pointerIn(event, this.canvas).x);
    const { drag, view } = this;
    if (drag.kind === "left") view.show(Math.min(unit, drag.to), drag.to);
    else if (drag.kind === "right") view.show(drag.from, Math.max(unit, drag.from));
    else if (drag.kind === "pan") view.show(drag.from + unit - drag.unit, drag.to + unit - drag.unit);
    else view.show(Math.min(drag.unit, unit), Math.max(drag.unit, unit));
  }
}
