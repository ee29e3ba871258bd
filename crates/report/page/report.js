// The report of one recording: puts the drawings, the table and the buttons together.

import { PARTS, Recording, eventName } from "./recording.js";
import { formatBytes, formatCount, formatShare, formatTime } from "./format.js";
import { View } from "./view.js";
import { findFrames, foundAt } from "./search.js";
import { Overview, TimelinePlot } from "./timeline.js";
import { BandsPlot } from "./bands.js";
import { SegmentMap } from "./map.js";
import { CursorFlame } from "./flame.js";
import { HoldersTable, make, swatch } from "./holders.js";
import { onThemeChange, theme } from "./theme.js";
import { ageColour } from "./colours.js";

/** An element of the page by its id. */
export function byId(id) {
  return document.getElementById(id);
}

/** The legend of the parts. */
export function fillLegend(list, marks) {
  const { parts, text, oom, retry } = theme();
  const items = PARTS.map(({ name, label, help }) => {
    const item = make("li", "", swatch(parts[name]), label);
    item.title = help;
    return item;
  });
  const line = swatch(text);
  line.className = "line";
  items.push(make("li", "", line, "reserved"));
  const kinds = [["oom", "out of memory", oom], ["retry", "retry", retry]];
  for (const [kind, label, colour] of kinds) {
    if (marks.some((mark) => mark.kind === kind)) items.push(make("li", "", swatch(colour), label));
  }
  list.replaceChildren(...items);
}

/** The headline and the sentences of an explanation. */
export function fillProse({ headline, prose, remarks, figures }) {
  const heading = byId("headline");
  heading.textContent = headline[0].toUpperCase() + headline.slice(1);
  heading.className = figures.ooms > 0 ? "oom" : "";
  const lines = [...prose, ...remarks.map((remark) => `Remark: ${remark}.`)].filter(Boolean);
  byId("prose").replaceChildren(...lines.map((line) => make("p", "", line)));
}

/** A figure with its name. */
export function figure(name, value, detail = "") {
  const data = make("dd", "", value, " ", make("small", "", detail));
  data.dataset.figure = name.replaceAll(" ", "-");
  return make("div", "", make("dt", "", name), data);
}

export class Report {
  static async open(manifest) {
    const report = new Report();
    report.manifest = manifest;
    report.recordings = new Map();
    const recording = await report.recording(0);
    byId("main").replaceChildren(byId("report").content.cloneNode(true));
    report.build(recording);
    return report;
  }

  /** A device's recording, which is decoded when it is first shown. */
  async recording(number) {
    if (!this.recordings.has(number)) {
      this.recordings.set(number, await Recording.open(this.manifest.devices[number]));
    }
    return this.recordings.get(number);
  }

  build(recording) {
    const view = (this.view = new View(recording));
    this.overview = new Overview(byId("overview"), view);
    this.timeline = new TimelinePlot(byId("timeline"), view);
    this.bands = new BandsPlot(byId("bands"), view, byId("bands-note"));
    this.map = new SegmentMap(byId("map"), view);
    this.flame = new CursorFlame(byId("flame"), view, byId("flame-note"));
    this.holders = new HoldersTable(byId("holders"), view, byId("holders-note"), (call) => this.search(call));
    view.listen(["recording"], () => this.updateSummary());
    view.listen(["recording", "cursor"], () => this.updateMoment());
    view.listen(["cursor", "search"], () => this.updateFound());
    view.listen(["range", "colour", "frames"], () => this.updateTools());
    onThemeChange(() => view.changed("recording", "range", "cursor", "colour"));
    this.connect();
    view.changed("recording", "range", "cursor", "colour", "frames");
  }

  connect() {
    const { view } = this;
    const click = (id, act) => byId(id).addEventListener("click", act);
    click("axis", () => view.toggleAxis());
    click("zoom-in", () => view.zoom(0.5));
    click("zoom-out", () => view.zoom(2));
    click("reset", () => view.reset());
    click("previous", () => view.moveCursor(view.cursor - 1));
    click("next", () => view.moveCursor(view.cursor + 1));
    click("to-peak", () => this.toPeak("peak_live"));
    click("to-reserved", () => this.toPeak("peak_reserved"));
    click("to-oom", () => this.toNextMark("oom"));
    click("colour", () => view.toggleColour());
    click("frames", () => view.toggleFrames());
    byId("search").addEventListener("input", () => this.search(byId("search").value));
    const choice = byId("device");
    const { devices } = this.manifest;
    byId("devices").hidden = devices.length < 2;
    choice.replaceChildren(...devices.map(({ device }, at) => new Option(String(device), String(at))));
    choice.addEventListener("change", async () => {
      view.open(await this.recording(Number(choice.value)));
      this.search(byId("search").value);
    });
  }

  toPeak(name) {
    this.view.moveCursor(this.view.recording.info.figures[name].position);
  }

  /** The next mark of a kind behind the cursor, or again the first. */
  toNextMark(kind) {
    const marks = this.view.recording.info.marks.filter((mark) => mark.kind === kind);
    const next = marks.find((mark) => mark.position > this.view.cursor) ?? marks[0];
    if (next) this.view.moveCursor(next.position);
  }

  search(text) {
    const input = byId("search");
    if (input.value !== text) input.value = text;
    this.view.search = findFrames(this.view.recording, text);
    this.view.changed("search");
  }

  updateSummary() {
    const { info } = this.view.recording;
    const { figures } = info;
    fillProse(info);
    const at = (peak) => (figures.duration_us > 0 ? `at ${formatTime(peak.time_us)}` : "");
    const duration = figures.duration_us > 0 ? `in ${formatTime(figures.duration_us)}` : "";
    const { peak_live: live, peak_reserved: reserved } = figures;
    const lost = reserved.reserved_bytes - reserved.live_bytes;
    byId("figures").replaceChildren(
      figure("peak live", formatBytes(live.live_bytes), at(live)),
      figure("peak reserved", formatBytes(reserved.reserved_bytes), at(reserved)),
      figure("not live at that peak", formatBytes(lost), formatShare(lost, reserved.reserved_bytes)),
      figure("events", formatCount(figures.events), duration),
      figure("allocations", formatCount(figures.allocations)),
      figure("retries", formatCount(figures.retries)),
      figure("out of memory", formatCount(figures.ooms)),
    );
    fillLegend(byId("legend"), info.marks);
    byId("to-oom").hidden = figures.ooms === 0;
    // Without a history there is one moment.
    byId("over-time").hidden = byId("moves").hidden = figures.events === 0;
    for (const id of ["timeline", "bands"]) {
      byId(id).setAttribute("role", "img");
      byId(id).setAttribute("aria-label", `${info.headline}; peak live ${formatBytes(live.live_bytes)}`);
    }
  }

  updateMoment() {
    const { recording, cursor } = this.view;
    const sample = recording.sampleAt(cursor);
    const event = recording.eventAt(cursor);
    const when = recording.events === 0
      ? "When the snapshot was taken"
      : `At ${formatTime(recording.timeOf(cursor))}, ${eventName(cursor)}${event.text && `: ${event.text}`}`;
    byId("moment").textContent = when;
    const { parts } = theme();
    const bar = make("div", "bar");
    const list = make("ul");
    for (const { name, label, help } of PARTS) {
      const piece = make("span");
      piece.style.cssText = `flex: ${sample[name]} 0 0; background: ${parts[name]}`;
      piece.title = `${label}: ${formatBytes(sample[name])}`;
      bar.append(piece);
      const item = make("li", "", swatch(parts[name]), `${label} `, make("b", "", formatBytes(sample[name])), " ");
      item.append(make("span", "", formatShare(sample[name], sample.reserved)));
      item.title = help;
      item.dataset.part = name;
      list.append(item);
    }
    const total = make("li", "", "reserved ", make("b", "", formatBytes(sample.reserved)));
    total.dataset.part = "reserved";
    list.append(total);
    if (!recording.isExact) {
      const count = recording.levels[0].positions;
      list.append(make("li", "", make("span", "", `of ${count} events the one with the most live memory`)));
    }
    byId("parts").replaceChildren(bar, list);
  }

  updateFound() {
    const { recording, cursor, search } = this.view;
    if (!search) {
      byId("found").textContent = "";
      return;
    }
    const { bytes, count } = foundAt(recording, search, cursor);
    byId("found").textContent = search.count === 0
      ? "nothing found"
      : `${formatBytes(bytes)} in ${formatCount(count)} ${count === 1 ? "block" : "blocks"}`;
  }

  updateTools() {
    const { view } = this;
    byId("axis").textContent = view.axis === "time" ? "by time" : "by event";
    byId("axis").disabled = view.recording.info.figures.duration_us === 0;
    byId("colour").textContent = `coloured by ${view.colourBy}`;
    byId("ages").hidden = view.colourBy !== "age";
    byId("ages").querySelector(".ramp").style.background =
      `linear-gradient(90deg, ${[0, 0.25, 0.5, 0.75, 1].map(ageColour).join(", ")})`;
    byId("frames").textContent = view.showsAllFrames ? "wrappers shown" : "wrappers hidden";
    byId("frames").setAttribute("aria-pressed", String(view.showsAllFrames));
    const [low, high] = view.whole;
    byId("reset").disabled = view.from <= low && view.to >= high;
  }
}
