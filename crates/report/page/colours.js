// Colours of allocations: by group (who allocated), or by age. The same group has the same colour everywhere.

import { theme } from "./theme.js";

/** Hues of the heaviest groups, in an order in which neighbours differ most. */
const HUES = [250, 60, 150, 310, 100, 200, 25, 275, 130, 340, 80, 175];

const cache = new Map();

function cached(key, make) {
  const full = `${theme().isDark}${key}`;
  let colour = cache.get(full);
  if (!colour) cache.set(full, (colour = make()));
  return colour;
}

/** The colour of the group of a rank: the first twelve are told apart, the others are greyish. */
export function groupColour(rank) {
  return cached(`g${rank}`, () => {
    const isDark = theme().isDark;
    if (rank < HUES.length) return `oklch(${isDark ? 0.66 : 0.64} 0.125 ${HUES[rank]})`;
    const lightness = (isDark ? 0.5 : 0.7) + 0.04 * ((rank * 7) % 4);
    return `oklch(${lightness} 0.035 ${(rank * 47) % 360})`;
  });
}

/** The colour of a block for a reader's choice: by its category, or else by who allocated it. */
export function blockColour(recording, colourBy, allocation) {
  const { allocations, groups } = recording;
  if (colourBy === "category") return theme().categories[allocations.category[allocation]];
  return groupColour(groups.list[groups.of[allocation]].rank);
}

/** The colour of a category below dark text: in the light theme it is mixed with white. */
export function paleCategory(index) {
  const colour = theme().categories[index];
  if (theme().isDark) return colour;
  const channels = [1, 3, 5].map((at) => Number.parseInt(colour.slice(at, at + 2), 16));
  return `rgb(${channels.map((value) => Math.round(255 - (255 - value) * 0.55)).join(" ")})`;
}

/** The colour of an age: 0 is allocated just now, 1 at the start. */
export function ageColour(age) {
  const step = Math.round(Math.min(1, Math.max(0, age)) * 24) / 24;
  return cached(`a${step}`, () => {
    const isDark = theme().isDark;
    const young = isDark ? [0.86, 0.15, 95] : [0.8, 0.15, 90];
    const old = isDark ? [0.42, 0.11, 285] : [0.4, 0.13, 285];
    const mix = young.map((value, at) => value + (old[at] - value) * step);
    return `oklch(${mix[0]} ${mix[1]} ${mix[2] + (step > 0 ? 0 : 0)})`;
  });
}
