// What memory over time is stacked of: the parts of reserved memory, or allocated memory by category below the others.

import { PARTS } from "./recording.js";
import { theme } from "./theme.js";

/** The layers from below; each has `name`, `label`, `help`, `colour`, and `bytes(level, bucket)`. */
export function layersOf(recording, stackBy) {
  const colours = theme();
  const parts = PARTS.map((part) => {
    return { ...part, colour: colours.parts[part.name], bytes: (level, at) => level[part.name][at] };
  });
  if (stackBy !== "category" || !recording.hasCategories) return parts;
  return [...categoryLayers(recording), ...parts.slice(1)];
}

/** The categories alone. They add up to what is allocated, as requested. */
export function categoryLayers(recording) {
  const colours = theme();
  return recording.categories.map(({ name, label }, index) => ({
    name,
    label,
    help: "requested bytes of allocated blocks",
    colour: colours.categories[index],
    bytes: (level, at) => level.categories[index][at],
  }));
}
