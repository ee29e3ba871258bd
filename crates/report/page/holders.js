// A table of who holds memory at the cursor. It is also the legend of the colours.

import { formatBytes, formatCount, formatShare } from "./format.js";
import { blockColour, groupColour } from "./colours.js";
import { make, swatch } from "./dom.js";

const ROWS = 60;

export class HoldersTable {
  constructor(table, view, note, onChoose) {
    this.table = table;
    this.view = view;
    this.note = note;
    this.onChoose = onChoose;
    view.listen(["recording", "cursor", "search", "colour"], () => this.update());
  }

  update() {
    const { recording, cursor, search } = this.view;
    const holders = holdersAt(recording, cursor, search);
    const total = holders.reduce((sum, holder) => sum + holder.bytes, 0);
    const head = make("tr", "", make("th", "", "allocated by"));
    for (const name of ["bytes", "share", "blocks"]) head.append(make("th", "number", name));
    const rows = holders.slice(0, ROWS).map((holder) => this.row(holder, total));
    this.table.replaceChildren(make("thead", "", head), make("tbody", "", ...rows));
    const listed = holders.length > ROWS ? `the largest ${ROWS} of ${formatCount(holders.length)}` : "";
    const hidden = unlistedAt(recording, cursor, total);
    const small = hidden > 0 ? `without ${formatBytes(hidden)} in small allocations that the page leaves out` : "";
    this.note.textContent = [listed, small].filter(Boolean).join("; ");
  }

  row({ group, bytes, count, isFound, largest }, total) {
    const { recording, colourBy } = this.view;
    const { call, line, rank } = recording.groups.list[group];
    // The table is the legend of the colours: a holder has that of its largest block.
    const colour = colourBy === "category" ? blockColour(recording, colourBy, largest) : groupColour(rank);
    const name = make("td", "", make("div", "call", swatch(colour), call));
    if (line && line !== call) name.append(make("div", "line", `from ${line}`));
    const numbers = [formatBytes(bytes), formatShare(bytes, total), formatCount(count)];
    const row = make("tr", isFound ? "match" : "", name, ...numbers.map((text) => make("td", "number", text)));
    row.tabIndex = 0;
    row.addEventListener("click", () => this.onChoose(group));
    row.addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.onChoose(group);
    });
    return row;
  }
}

/** The groups of allocated blocks at a position, the largest first. */
export function holdersAt(recording, position, search = null) {
  const { allocations, groups } = recording;
  const found = new Map();
  for (const at of recording.activeAt(position)) {
    if (allocations.waits[at] <= position) continue;
    const group = groups.of[at];
    const holder = found.get(group) ?? { group, bytes: 0, count: 0, largest: at };
    holder.bytes += allocations.requested[at];
    holder.count += 1;
    if (allocations.requested[at] > allocations.requested[holder.largest]) holder.largest = at;
    holder.isFound ||= Boolean(search?.matches[at]);
    found.set(group, holder);
  }
  // Equal ones by name, as the command does.
  const isBefore = (a, b) => (groups.list[a.group].call < groups.list[b.group].call ? -1 : 1);
  return [...found.values()].sort((a, b) => b.bytes - a.bytes || isBefore(a, b));
}

/** Allocated bytes that are in no listed allocation: long recordings leave out small ones. */
function unlistedAt(recording, position, listed) {
  const isComplete = recording.info.figures.allocations_left_out === 0;
  return isComplete ? 0 : Math.max(0, recording.sampleAt(position).allocated - listed);
}
