// Many ranks: a heat map of their memory over time, and what is known of the one that is chosen.

import { formatBytes, formatCount, formatTime } from "./format.js";
import { byId, copyText, make, makeButton, swatch } from "./dom.js";
import { onThemeChange, theme } from "./theme.js";
import { Surface, fitText, pointerIn } from "./canvas.js";
import { hideTooltip, showTooltip } from "./tooltip.js";
import { figure } from "./summary.js";

const HEAT_LEFT = 120;
const HEAT_RIGHT = 8;
const HEAT_BOTTOM = 18;
const RAMP_STEPS = 32;

export class RanksPage {
  static async open(manifest) {
    const page = new RanksPage();
    page.report = manifest.ranks;
    page.rows = page.report.ranks;
    page.metric = "allocated";
    page.order = "rank";
    page.text = "";
    page.chosen = -1;
    page.clock = clockOf(page.rows);
    byId("main").replaceChildren(byId("ranks").content.cloneNode(true));
    page.connect();
    page.update();
    const first = page.rows.findIndex(({ name }) => name === page.report.limiting[0]);
    page.choose(Math.max(0, first));
    return page;
  }

  connect() {
    byId("heat-order").addEventListener("change", () => this.setOrder(byId("heat-order").value));
    byId("heat-metric").addEventListener("change", () => this.setMetric(byId("heat-metric").value));
    byId("search").placeholder = "Search ranks ( / )";
    byId("search").addEventListener("input", () => this.search(byId("search").value));
    const heat = byId("heat");
    this.surface = new Surface(heat.querySelector("canvas"), (context, width) => this.draw(context, width));
    this.surface.height = () => this.shown.length * this.rowHeight + HEAT_BOTTOM;
    heat.addEventListener("pointermove", (event) => this.point(event));
    heat.addEventListener("pointerleave", hideTooltip);
    heat.addEventListener("click", (event) => {
      const row = this.rowAt(pointerIn(event, heat).y);
      if (row >= 0) this.choose(row);
    });
    heat.addEventListener("keydown", (event) => {
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const at = this.shown.indexOf(this.chosen) + step;
      if (at >= 0 && at < this.shown.length) this.choose(this.shown[at]);
    });
    this.curve = new Surface(byId("rank-curve"), (context, width, height) => this.drawCurve(context, width, height));
    onThemeChange(() => {
      this.surface.redraw();
      this.choose(this.chosen);
    });
  }

  setOrder(order) {
    this.order = order;
    this.update();
  }

  setMetric(metric) {
    this.metric = metric;
    this.update();
  }

  search(text) {
    if (byId("search").value !== text) byId("search").value = text;
    this.text = text.trim().toLowerCase();
    this.update();
  }

  /** What is shown, in which order, and how high a row is. */
  update() {
    const { report, rows } = this;
    byId("headline").textContent = report.headline;
    byId("prose").replaceChildren(...report.sentences.map((line) => make("p", "", line)));
    byId("figures").replaceChildren(
      figure("recordings", formatCount(report.recordings)),
      figure("ran out of memory", formatCount(report.ran_out)),
      figure("groups of equal ranks", formatCount(report.groups.length)),
      figure("cannot be read", formatCount(report.unreadable)),
    );
    const place = new Map(report.limiting.map((name, at) => [name, at]));
    const key = {
      rank: (row) => row,
      limiting: (row) => place.get(rows[row].name) ?? rows.length,
      group: (row) => (rows[row].group ?? rows.length) * rows.length + row,
    }[this.order];
    const matches = ({ name, file, host }) => {
      return [name, file, host ?? ""].some((it) => it.toLowerCase().includes(this.text));
    };
    this.shown = rows.map((_, at) => at).filter((at) => matches(rows[at])).sort((a, b) => key(a) - key(b));
    byId("found").textContent = this.text ? `${formatCount(this.shown.length)} of ${formatCount(rows.length)}` : "";
    this.rowHeight = Math.min(22, Math.max(4, Math.floor(640 / Math.max(1, this.shown.length))));
    this.most = Math.max(1, ...rows.map((row) => Math.max(row.available_bytes ?? 0, row.peak_reserved_bytes ?? 0)));
    byId("heat-scale").textContent = `0 to ${formatBytes(this.most)}`;
    byId("heat-ramp").style.background = `linear-gradient(to right, ${[0, 0.25, 0.5, 0.75, 1].map(heatColour)})`;
    this.surface.redraw();
  }

  rowAt(y) {
    return this.shown[Math.floor(y / this.rowHeight)] ?? -1;
  }

  /** The drawn range of a row, in pixels. */
  range({ start_us: start, duration_us: duration }, width) {
    const whole = width - HEAT_LEFT - HEAT_RIGHT;
    const { clock } = this;
    if (!clock.isShared) return [HEAT_LEFT, HEAT_LEFT + (whole * (duration ?? clock.length)) / clock.length];
    const x = (us) => HEAT_LEFT + (whole * (us - clock.start)) / clock.length;
    return [x(start), Math.max(x(start) + 1, x(start + duration))];
  }

  values(row) {
    return (this.metric === "reserved" ? row.reserved_over_time : row.allocated_over_time) ?? [];
  }

  draw(context, width) {
    const { rowHeight, clock } = this;
    const colours = theme();
    context.font = colours.font;
    context.textBaseline = "middle";
    this.shown.forEach((at, line) => {
      const row = this.rows[at];
      const y = line * rowHeight;
      const gap = rowHeight > 6 ? 1 : 0;
      const [from, to] = this.range(row, width);
      const values = this.values(row);
      values.forEach((bytes, column) => {
        const left = Math.floor(from + ((to - from) * column) / values.length);
        const right = Math.ceil(from + ((to - from) * (column + 1)) / values.length);
        context.fillStyle = heatColour(bytes / this.most);
        context.fillRect(left, y, right - left, rowHeight - gap);
      });
      if (row.ooms > 0) {
        const share = row.oom_us === null || !row.duration_us ? 1 : (row.oom_us - row.start_us) / row.duration_us;
        context.fillStyle = colours.oom;
        context.fillRect(Math.round(from + (to - from) * share) - 1, y, 3, rowHeight - gap);
      }
      // Names where they fit; of thinner rows some.
      const every = Math.ceil(11 / rowHeight);
      if (line % every === 0) {
        context.fillStyle = row.error ? colours.oom : colours.muted;
        context.fillText(fitText(context, row.name, HEAT_LEFT - 8), 0, y + rowHeight / 2);
      }
      if (at === this.chosen) {
        context.strokeStyle = colours.accent;
        context.lineWidth = 2;
        context.strokeRect(HEAT_LEFT - 2, y, width - HEAT_LEFT - HEAT_RIGHT + 4, rowHeight - gap);
      }
    });
    const bottom = this.shown.length * rowHeight + HEAT_BOTTOM / 2;
    context.fillStyle = colours.muted;
    context.fillText(clock.hasTimes ? "0 s" : "first event", HEAT_LEFT, bottom);
    context.textAlign = "right";
    context.fillText(clock.hasTimes ? formatTime(clock.length) : "last event", width - HEAT_RIGHT, bottom);
    context.textAlign = "left";
  }

  point(event) {
    const heat = byId("heat");
    const { x, y } = pointerIn(event, heat);
    const at = this.rowAt(y);
    if (at < 0) return hideTooltip();
    const row = this.rows[at];
    const [from, to] = this.range(row, heat.clientWidth);
    const count = row.allocated_over_time?.length ?? 0;
    const column = Math.floor(((x - from) / (to - from)) * count);
    const lines = [row.name, row.error ?? row.words];
    if (column >= 0 && column < count) {
      lines.push(`${formatBytes(row.allocated_over_time[column])} allocated`);
      lines.push(`${formatBytes(row.reserved_over_time[column])} reserved`);
    }
    showTooltip(event, lines);
  }

  /** Opens a rank below the map. */
  choose(at) {
    this.chosen = at;
    const row = this.rows[at];
    byId("rank-title").textContent = row.error ? `${row.name}: cannot be read` : `${row.name}: ${row.words}`;
    const lines = row.error ? [row.error] : row.evidence;
    byId("rank-prose").replaceChildren(...lines.map((line) => make("p", "", line)));
    byId("rank-shown").hidden = Boolean(row.error);
    this.fillTools(row);
    if (!row.error) this.fillRank(row);
    this.surface.redraw();
    this.curve.redraw();
  }

  fillTools(row) {
    const tools = [];
    if (row.link) {
      const link = make("a", "", "Open its page");
      link.href = row.link;
      tools.push(link);
    } else if (row.file && !row.error) {
      const copy = () => copyText(`warpool view '${row.file}'`, button);
      const button = makeButton("Copy command", copy, "warpool view FILE");
      tools.push(button);
    }
    byId("rank-tools").replaceChildren(...tools);
  }

  fillRank(row) {
    const group = this.report.groups[row.group];
    const others = group.names.length - 1;
    const about = row.available_assumed ? "~" : "";
    const margin = row.margin_bytes === null ? "–" : `${about}${formatBytes(row.margin_bytes)}`;
    byId("rank-figures").replaceChildren(
      figure("most allocated", formatBytes(row.peak_allocated_bytes)),
      figure("most reserved", formatBytes(row.peak_reserved_bytes)),
      figure("needed", formatBytes(row.peak_needed_bytes)),
      figure("margin", margin),
      figure("equal ranks", formatCount(others)),
      figure("events", formatCount(row.events)),
    );
    const kinds = row.categories.map(({ name, bytes }) => {
      const kind = make("td", "", swatch(theme().categoryNamed(name)), name);
      return make("tr", "", kind, make("td", "number", formatBytes(bytes)));
    });
    byId("rank-categories").replaceChildren(make("tbody", "", ...kinds));
    const holders = row.holders.map(({ name, line, bytes, count }) => {
      const call = make("td", "", make("div", "call", name));
      if (line && line !== name) call.append(make("div", "line", `from ${line}`));
      return make("tr", "", call, make("td", "number", formatBytes(bytes)), make("td", "number", formatCount(count)));
    });
    const head = make("tr", "", make("th", "", "allocated by"));
    head.append(make("th", "number", "bytes"), make("th", "number", "blocks"));
    byId("rank-holders").replaceChildren(make("thead", "", head), make("tbody", "", ...holders));
  }

  drawCurve(context, width, height) {
    const row = this.rows[this.chosen];
    if (!row || row.error || !row.allocated_over_time?.length) return;
    const colours = theme();
    const y = (bytes) => height - 2 - ((height - 14) * bytes) / this.most;
    const area = (values, colour) => {
      context.fillStyle = colour;
      context.beginPath();
      context.moveTo(0, height);
      values.forEach((bytes, at) => {
        context.lineTo((width * at) / values.length, y(bytes));
        context.lineTo((width * (at + 1)) / values.length, y(bytes));
      });
      context.lineTo(width, height);
      context.fill();
    };
    area(row.reserved_over_time, colours.parts.cached);
    area(row.allocated_over_time, colours.parts.allocated);
    if (row.available_bytes === null) return;
    context.fillStyle = colours.oom;
    context.fillRect(0, y(row.available_bytes), width, 1);
    context.font = colours.font;
    context.textBaseline = "bottom";
    context.fillText(`${formatBytes(row.available_bytes)} available`, 4, y(row.available_bytes) - 1);
  }
}

/** One axis for all: the time of day if the recordings overlap in it, else the time since each one's first event. */
function clockOf(rows) {
  const timed = rows.filter(({ start_us: start, duration_us: duration }) => start != null && duration != null);
  const hasTimes = timed.length > 0;
  const readable = rows.filter(({ error }) => !error);
  const start = Math.min(...timed.map((row) => row.start_us));
  const ends = timed.map((row) => row.start_us + row.duration_us);
  const isShared = hasTimes && timed.length === readable.length
    && Math.max(...timed.map((row) => row.start_us)) <= Math.min(...ends);
  const own = Math.max(1, ...timed.map((row) => row.duration_us));
  return { hasTimes, isShared, start, length: isShared ? Math.max(1, Math.max(...ends) - start) : own };
}

/** From nothing to all that a device has: pale to dark, and red where hardly anything is left. */
function heatColour(share) {
  const step = Math.round(Math.min(1, Math.max(0, share)) * RAMP_STEPS) / RAMP_STEPS;
  const { isDark } = theme();
  const lightness = isDark ? 0.24 + 0.5 * step : 0.95 - 0.5 * step;
  const hue = step > 0.85 ? 30 : 250;
  return `oklch(${lightness.toFixed(3)} ${(0.02 + 0.13 * step).toFixed(3)} ${hue})`;
}
