// Keys of the report, and the list of them.

import { byId, make } from "./dom.js";
import { toggleTheme } from "./theme.js";

/** What a key does in a report of one recording, and how it is explained. */
function reportKeys(report) {
  const { view } = report;
  const step = (event) => (event.shiftKey ? Math.max(1, Math.round(view.recording.events / 100)) : 1);
  const back = (event) => view.moveCursor(view.cursor - step(event));
  const on = (event) => view.moveCursor(view.cursor + step(event));
  return [
    { keys: ["ArrowLeft"], label: "← →", text: "one event back or on; with Shift a hundredth of all", act: back },
    { keys: ["ArrowRight"], act: on },
    { keys: ["+", "="], label: "+", text: "zoom in at the cursor", act: () => view.zoom(0.5) },
    { keys: ["-"], label: "−", text: "zoom out", act: () => view.zoom(2) },
    { keys: ["["], label: "[ ]", text: "show what is to the left or right", act: () => view.pan(-0.5) },
    { keys: ["]"], act: () => view.pan(0.5) },
    { keys: ["0"], label: "0", text: "show all", act: () => view.reset() },
    { keys: ["Home"], label: "Home, End", text: "the first or last event", act: () => view.moveCursor(0) },
    { keys: ["End"], act: () => view.moveCursor(view.recording.events) },
    { keys: ["p"], label: "p", text: "the most allocated memory", act: () => report.toPeak("peak_live") },
    { keys: ["r"], label: "r", text: "the most reserved memory", act: () => report.toPeak("peak_reserved") },
    { keys: ["o"], label: "o", text: "the next out-of-memory event", act: () => report.toNextMark("oom") },
    { keys: ["y"], label: "y", text: "the next retry", act: () => report.toNextMark("retry") },
    { keys: ["a"], label: "a", text: "colour by stack, category or age", act: () => view.toggleColour() },
    { keys: ["s"], label: "s", text: "memory over time by part or by category", act: () => view.toggleLayers() },
    { keys: ["c"], label: "c", text: "copy the pinned stack", act: () => report.pin.copy() },
    { keys: ["e"], label: "e", text: "the list of events; ↑ ↓ step through it", act: () => byId("events").focus() },
    { keys: ["f"], label: "f", text: "show or hide frames that only call on", act: () => view.toggleFrames() },
    { keys: ["x"], label: "x", text: "by time or by event", act: () => view.toggleAxis() },
    { keys: [], label: "click", text: "set the cursor; on a block, a band, a call or a holder pin its stack" },
    { keys: [], label: "drag", text: "zoom to a range; a double click shows all" },
    { keys: [], label: "Ctrl and wheel", text: "zoom; with Shift it moves" },
  ];
}

/** Connects the keys. Without a view (in a difference, of ranks) only the common ones do something. */
export function connectKeys(report) {
  const search = byId("search");
  const dialog = byId("keys");
  const common = [
    { keys: ["/"], label: "/", text: "search by function, file or line", act: () => search.focus() },
    { keys: ["t"], label: "t", text: "light or dark", act: toggleTheme },
    { keys: ["?"], label: "?", text: "this list", act: () => dialog.showModal() },
    { keys: [], label: "Esc", text: "unpin; then end the search, show all of the flame graph" },
  ];
  const keys = [...(report.view ? reportKeys(report) : []), ...common];
  const rows = keys.filter(({ label }) => label);
  byId("key-list").replaceChildren(...rows.flatMap(({ label, text }) => [make("dt", "", label), make("dd", "", text)]));
  byId("help").addEventListener("click", () => dialog.showModal());
  byId("theme").addEventListener("click", toggleTheme);
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || dialog.open) return;
    if (event.key === "Escape") {
      if (report.pin?.close()) return;
      report.search("");
      report.flame?.graph.zoomTo(0);
      search.blur();
      return;
    }
    if (event.target.matches("input, select, textarea")) return;
    const found = keys.find((entry) => entry.keys.includes(event.key));
    if (!found) return;
    event.preventDefault();
    found.act(event);
  });
}
