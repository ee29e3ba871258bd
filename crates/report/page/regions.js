// Regions that the program named, over the axis of the charts: nested in rows, a click zooms to one.

import { upperBound } from "./recording.js";
import { formatCount, formatBytes, formatTime, signedBytes } from "./format.js";
import { Surface, fitText, pointerIn } from "./canvas.js";
import { MARGIN } from "./view.js";
import { theme } from "./theme.js";
import { hideTooltip, showTooltip } from "./tooltip.js";

const REGION_ROW = 17;
/** More rows are below the edge; zooming in does not help there, so they are counted in the note. */
const REGION_ROWS_SHOWN = 6;

export class RegionStrip {
  constructor(element, view, note) {
    this.element = element;
    this.view = view;
    this.note = note;
    this.chosen = -1;
    this.surface = new Surface(element.querySelector("canvas"), (...args) => this.draw(...args));
    this.surface.height = () => Math.max(1, Math.min(REGION_ROWS_SHOWN, this.rows.length)) * REGION_ROW + 2;
    view.listen(["recording"], () => this.open());
    view.listen(["range", "cursor"], () => this.surface.redraw());
    element.addEventListener("pointermove", (event) => this.hover(event));
    element.addEventListener("pointerleave", hideTooltip);
    element.addEventListener("click", (event) => {
      const found = this.find(pointerIn(event, element));
      if (found >= 0) this.zoomTo(found);
    });
    element.addEventListener("keydown", (event) => this.key(event));
  }

  open() {
    const { regions, info } = this.view.recording;
    this.chosen = -1;
    // In each row they are sorted and do not overlap, so those that are visible are found by halving.
    this.rows = Array.from({ length: regions.rows }, () => []);
    for (let at = 0; at < regions.count; at++) this.rows[regions.row[at]].push(at);
    this.element.parentElement.hidden = regions.count === 0;
    const hidden = this.rows.slice(REGION_ROWS_SHOWN).reduce((sum, row) => sum + row.length, 0) + info.regions_left_out;
    this.note.textContent =
      `${formatCount(regions.count)} regions that the program named` +
      (hidden > 0 ? `; ${formatCount(hidden)} of them are not drawn` : "");
    this.surface.redraw();
  }

  /** The start and end of a region on the axis. */
  spanOf(at) {
    const { regions } = this.view.recording;
    return this.view.axis === "time"
      ? [regions.fromTime[at], regions.untilTime[at]]
      : [regions.from[at], regions.until[at]];
  }

  /** Calls `visit(region, x, size, row)` for those that are visible; of several in one pixel for the first. */
  visit(width, visit) {
    const { view } = this;
    this.rows.slice(0, REGION_ROWS_SHOWN).forEach((list, row) => {
      let [first, high] = [0, list.length];
      while (first < high) {
        const middle = (first + high) >> 1;
        if (this.spanOf(list[middle])[1] < view.from) first = middle + 1;
        else high = middle;
      }
      let drawnTo = -Infinity;
      for (let at = first; at < list.length; at++) {
        const [from, until] = this.spanOf(list[at]);
        if (from > view.to) break;
        const left = Math.max(MARGIN.left, view.x(from, width));
        const right = Math.min(width - MARGIN.right, Math.max(view.x(until, width), left + 1));
        if (right <= drawnTo) continue;
        drawnTo = Math.ceil(right);
        visit(list[at], left, right - left, row);
      }
    });
  }

  draw(context, width) {
    const colours = theme();
    this.places = [];
    context.font = colours.font;
    context.textBaseline = "middle";
    context.textAlign = "left";
    this.visit(width, (at, x, size, row) => {
      const y = row * REGION_ROW + 1;
      context.fillStyle = at === this.chosen ? colours.accent : colours.region;
      context.fillRect(x, y, Math.max(1, size > 3 ? size - 1 : size), REGION_ROW - 2);
      context.fillStyle = at === this.chosen ? colours.surface : colours.text;
      const name = size > 24 ? fitText(context, this.view.recording.regions.nameOf(at), size - 8) : "";
      if (name) context.fillText(name, x + 4, y + REGION_ROW / 2 - 0.5);
      this.places.push({ at, x, size, y });
    });
    const x = this.view.x(this.view.unitOf(this.view.cursor), width);
    if (x < MARGIN.left - 1 || x > width - MARGIN.right + 1) return;
    context.fillStyle = colours.accent;
    context.fillRect(Math.round(x) - 1, 0, 2, this.rows.length * REGION_ROW + 2);
  }

  find({ x, y }) {
    const isInside = (place) =>
      y >= place.y && y < place.y + REGION_ROW && x >= place.x - 1 && x <= place.x + Math.max(2, place.size);
    return this.places?.find(isInside)?.at ?? -1;
  }

  hover(event) {
    const at = this.find(pointerIn(event, this.element));
    if (at < 0) hideTooltip();
    else showTooltip(event, [...this.lines(at), "click to zoom to it"]);
  }

  lines(at) {
    const { recording } = this.view;
    const { regions } = recording;
    const [from, until] = [regions.from[at], regions.until[at]];
    const change = recording.sampleAt(until).live - recording.sampleAt(from).live;
    return [
      regions.nameOf(at),
      `${formatTime(regions.untilTime[at] - regions.fromTime[at])}, ${formatCount(until - from)} events`,
      `allocated ${formatBytes(recording.sampleAt(from).live)} at its start, ${signedBytes(change)} at its end`,
      !regions.hasStart(at) && "its start is not recorded",
      !regions.hasEnd(at) && "its end is not recorded",
    ];
  }

  /** Shows a region with a little around it. Its last event stays visible where time has no width. */
  zoomTo(at) {
    const [from, until] = this.spanOf(at);
    const around = Math.max((until - from) * 0.05, this.view.smallest / 2);
    this.choose(at);
    this.view.show(from - around, until + around);
  }

  choose(at) {
    this.chosen = at;
    this.note.textContent = this.lines(at).filter(Boolean).slice(0, 2).join(": ");
    this.surface.redraw();
  }

  /** The arrows go from region to region, with the cursor; Enter zooms. */
  key(event) {
    const { regions } = this.view.recording;
    if (event.key === "Enter") {
      this.zoomTo(this.chosen >= 0 ? this.chosen : this.nextTo(this.view.cursor, 0));
    } else if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      const step = event.key === "ArrowLeft" ? -1 : 1;
      const from = this.chosen >= 0 ? this.chosen + step : this.nextTo(this.view.cursor, step);
      const at = Math.min(regions.count - 1, Math.max(0, from));
      this.choose(at);
      this.view.moveCursor(regions.from[at]);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  nextTo(position, step) {
    const { regions } = this.view.recording;
    const behind = upperBound(regions.from, position, 0, regions.count);
    return Math.min(regions.count - 1, Math.max(0, step > 0 ? behind : behind - 1));
  }
}
