// Light or dark: as the system says, until the reader chooses. Colours for canvases are read from the style sheet.

const listeners = [];
let colours = null;

/** In the order in which the data has them. */
const CATEGORY_VARIABLES = [
  "parameters", "gradients", "optimizer-state", "activations", "temporaries", "inputs", "unknown",
];

/** The colours of the current theme. */
export function theme() {
  if (!colours) {
    const style = getComputedStyle(document.documentElement);
    const value = (name) => style.getPropertyValue(name).trim();
    const names = [
      "surface", "text", "muted", "line", "grid", "accent", "oom", "retry", "free", "gap", "match", "region",
    ];
    colours = { isDark: value("--scheme") === "dark", font: value("--font-small") };
    for (const name of names) colours[name] = value(`--${name}`);
    colours.parts = {};
    for (const part of ["allocated", "rounding", "waiting", "fragmentation", "cached"]) {
      colours.parts[part] = value(`--part-${part}`);
    }
    colours.categoryNamed = (label) => value(`--category-${label.replaceAll(" ", "-")}`);
    colours.categories = CATEGORY_VARIABLES.map((name) => value(`--category-${name}`));
  }
  return colours;
}

/** Calls `redraw` after every change of the theme. */
export function onThemeChange(redraw) {
  listeners.push(redraw);
}

/** Switches between light and dark. */
export function toggleTheme() {
  document.documentElement.dataset.theme = theme().isDark ? "light" : "dark";
  changed();
}

function changed() {
  colours = null;
  for (const redraw of listeners) redraw();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
