// The report of one recording: puts the drawings, the table and the buttons together.

import { Recording, eventName } from "./recording.js";
import { formatBytes, formatCount, formatShare, formatTime } from "./format.js";
import { View } from "./view.js";
import { findFrames, foundAt } from "./search.js";
import { Overview, TimelinePlot } from "./timeline.js";
import { BandsPlot } from "./bands.js";
import { SegmentMap } from "./map.js";
import { CursorFlame } from "./flame.js";
import { HoldersTable } from "./holders.js";
import { RegionStrip } from "./regions.js";
import { EventTable } from "./eventtable.js";
import { PinPanel, pinAllocation, pinHolder } from "./pin.js";
import { figure, fillAdvice, fillMoments, fillProse, markMoment } from "./summary.js";
import { categoryLayers, layersOf } from "./layers.js";
import { applyHash, keepHash, readHash } from "./hash.js";
import { byId, make, swatch } from "./dom.js";
import { onThemeChange, theme } from "./theme.js";
import { ageColour } from "./colours.js";

/** The legend of the layers. */
export function fillLegend(list, layers, marks) {
  const { text, oom, retry } = theme();
  const items = layers.map(({ label, help, colour }) => {
    const item = make("li", "", swatch(colour), label);
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

/** Layers of one bucket: a bar, and a list with bytes and shares of a whole. */
function shares(layers, level, bucket, whole) {
  const bar = make("div", "bar");
  const list = make("ul");
  for (const { name, label, help, colour, bytes: of } of layers) {
    const bytes = of(level, bucket);
    const piece = make("span");
    piece.style.cssText = `flex: ${bytes} 0 0; background: ${colour}`;
    piece.title = `${label}: ${formatBytes(bytes)}`;
    bar.append(piece);
    const item = make("li", "", swatch(colour), `${label} `, make("b", "", formatBytes(bytes)), " ");
    item.append(make("span", "", formatShare(bytes, whole)));
    item.title = help;
    item.dataset.part = name;
    list.append(item);
  }
  return { bar, list };
}

export class Report {
  static async open(manifest) {
    const report = new Report();
    report.manifest = manifest;
    report.recordings = new Map();
    const choices = readHash();
    report.device = manifest.devices[choices.device] ? Number(choices.device) : 0;
    const recording = await report.recording(report.device);
    byId("main").replaceChildren(byId("report").content.cloneNode(true));
    report.build(recording, choices);
    return report;
  }

  /** A device's recording, which is decoded when it is first shown. */
  async recording(number) {
    if (!this.recordings.has(number)) {
      this.recordings.set(number, await Recording.open(this.manifest.devices[number]));
    }
    return this.recordings.get(number);
  }

  build(recording, choices) {
    const view = (this.view = new View(recording));
    const pinBlock = (at) => view.pin(pinAllocation(view.recording, at));
    const pinGroup = (group) => view.pin(pinHolder(view.recording, group, view.cursor));
    this.overview = new Overview(byId("overview"), view);
    this.timeline = new TimelinePlot(byId("timeline"), view);
    this.regions = new RegionStrip(byId("regions"), view, byId("regions-note"));
    this.bands = new BandsPlot(byId("bands"), view, byId("bands-note"), pinBlock);
    this.map = new SegmentMap(byId("map"), view, pinBlock);
    this.flame = new CursorFlame(byId("flame"), view, byId("flame-note"));
    this.holders = new HoldersTable(byId("holders"), view, byId("holders-note"), pinGroup);
    const table = { scroll: byId("events"), note: byId("events-note") };
    this.events = new EventTable({ ...table, action: byId("event-action"), text: byId("event-text") }, view, pinBlock);
    this.pin = new PinPanel(byId("pin"), view, (call) => this.search(call));
    view.listen(["recording"], () => this.updateSummary());
    view.listen(["recording", "layers"], () => this.updateLegend());
    view.listen(["recording", "cursor"], () => this.updateMoment());
    view.listen(["cursor", "search"], () => this.updateFound());
    view.listen(["range", "colour", "frames", "layers", "recording"], () => this.updateTools());
    // The data is the same: only what has colours is drawn again.
    onThemeChange(() => view.changed("range", "cursor", "colour", "layers"));
    this.connect();
    view.changed("recording", "range", "cursor", "colour", "frames", "layers");
    applyHash(view, choices);
    view.changed("colour", "layers");
    keepHash(view, () => this.device);
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
    click("bands-colour", () => view.toggleColour());
    click("layers", () => view.toggleLayers());
    click("frames", () => view.toggleFrames());
    byId("search").addEventListener("input", () => this.search(byId("search").value));
    const choice = byId("device");
    const { devices } = this.manifest;
    byId("devices").hidden = devices.length < 2;
    choice.replaceChildren(...devices.map(({ device }, at) => new Option(String(device), String(at))));
    choice.value = String(this.device);
    choice.addEventListener("change", async () => {
      this.device = Number(choice.value);
      view.open(await this.recording(this.device));
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
    const duration = figures.duration_us > 0 ? `in ${formatTime(figures.duration_us)}` : "";
    fillAdvice(info.advice);
    fillMoments(this.view.recording, ({ position, name }) => {
      if (name === "out of memory") this.toNextMark("oom");
      else this.view.moveCursor(position);
    });
    const { peak_live: live, peak_reserved: reserved } = figures;
    const unused = reserved.reserved_bytes - reserved.live_bytes;
    byId("figures").replaceChildren(
      figure("not allocated at most reserved", formatBytes(unused), formatShare(unused, reserved.reserved_bytes)),
      figure("events", formatCount(figures.events), duration),
      figure("allocations", formatCount(figures.allocations)),
      figure("retries", formatCount(figures.retries)),
      figure("out of memory", formatCount(figures.ooms)),
    );
    byId("to-oom").hidden = figures.ooms === 0;
    // Without a history there is one moment.
    byId("over-time").hidden = byId("moves").hidden = byId("event-list").hidden = figures.events === 0;
    for (const id of ["timeline", "bands"]) {
      byId(id).setAttribute("role", "img");
      byId(id).setAttribute("aria-label", `${info.headline}; most allocated ${formatBytes(live.live_bytes)}`);
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
    markMoment(recording, cursor);
    const level = recording.levels[0];
    const bucket = recording.bucketAt(cursor);
    const { bar, list } = shares(layersOf(recording, "part"), level, bucket, sample.reserved);
    const total = (name, label, bytes) => {
      const item = make("li", "", `${label} `, make("b", "", formatBytes(bytes)));
      item.dataset.part = name;
      list.append(item);
    };
    total("live", "allocated (requested + rounding)", sample.live);
    total("reserved", "reserved", sample.reserved);
    if (!recording.isExact) {
      list.append(make("li", "", make("span", "", `of ${level.positions} events the one with the most live memory`)));
    }
    byId("parts").replaceChildren(bar, list);
    byId("categories").hidden = !recording.hasCategories;
    if (!recording.hasCategories) return;
    const categories = shares(categoryLayers(recording), level, bucket, sample.allocated);
    categories.list.prepend(make("li", "", make("span", "", "requested, by category:")));
    byId("categories").replaceChildren(categories.bar, categories.list);
  }

  updateLegend() {
    const { recording, stackBy } = this.view;
    fillLegend(byId("legend"), layersOf(recording, stackBy), recording.info.marks);
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
    byId("bands-colour").textContent = `coloured by ${view.colourBy === "category" ? "category" : "stack"}`;
    byId("bands-colour").hidden = byId("layers").hidden = !view.recording.hasCategories;
    byId("layers").textContent = `stacked by ${view.stackBy}`;
    byId("ages").hidden = view.colourBy !== "age";
    byId("ages").querySelector(".ramp").style.background =
      `linear-gradient(90deg, ${[0, 0.25, 0.5, 0.75, 1].map(ageColour).join(", ")})`;
    byId("frames").textContent = view.showsAllFrames ? "wrappers shown" : "wrappers hidden";
    byId("frames").setAttribute("aria-pressed", String(view.showsAllFrames));
    const [low, high] = view.whole;
    byId("reset").disabled = view.from <= low && view.to >= high;
  }
}
