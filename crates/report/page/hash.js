// The reader's choices in the page's address, so that a reload or a link shows the same: `#at=1200&colour=category`.

/** What the address says. */
export function readHash() {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}

/** Sets what the address asks for, as far as the recording has it. */
export function applyHash(view, { at, colour, layers, axis }) {
  if (view.colourings.includes(colour)) view.colourBy = colour;
  if (layers === "category" && view.recording.hasCategories) view.stackBy = layers;
  if (["time", "events"].includes(axis) && axis !== view.axis) view.toggleAxis();
  const position = Number.parseInt(at, 10);
  if (Number.isFinite(position)) view.moveCursor(position);
}

/** Keeps the address up to date, without entries in the browser's history. */
export function keepHash(view, device) {
  let isQueued = false;
  const write = () => {
    isQueued = false;
    const choices = { at: view.cursor, axis: view.axis };
    if (device() > 0) choices.device = device();
    if (view.colourBy !== "stack") choices.colour = view.colourBy;
    if (view.stackBy !== "part") choices.layers = view.stackBy;
    try {
      history.replaceState(null, "", `#${new URLSearchParams(choices)}`);
    } catch {
      // Some viewers do not let a page change its address; then it is not kept.
    }
  };
  // Browsers refuse too many changes in a short time, and a held key makes many.
  view.listen(["cursor", "colour", "layers", "range"], () => {
    if (!isQueued) setTimeout(write, 250);
    isQueued = true;
  });
}
