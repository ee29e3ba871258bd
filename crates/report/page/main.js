// Starts the page: reads what it shows, and opens the report, the difference or the ranks.

import { byId } from "./dom.js";
import { Report } from "./report.js";
import { Difference } from "./difference.js";
import { RanksPage } from "./ranks.js";
import { connectKeys } from "./keyboard.js";

async function start() {
  const manifest = JSON.parse(byId("manifest").textContent);
  byId("title").textContent = manifest.title;
  byId("title").title = manifest.title;
  const kind = manifest.ranks ? RanksPage : manifest.difference ? Difference : Report;
  const report = await kind.open(manifest);
  connectKeys(report);
  // For tests, and for curious readers in the console.
  globalThis.warpool = report;
  document.documentElement.dataset.ready = "true";
}

start().catch((error) => {
  const message = document.createElement("p");
  message.className = "failure";
  message.textContent = typeof DecompressionStream === "undefined"
    ? "This browser is too old for the page: it cannot decompress data (Chrome 103, Firefox 113 and Safari 16.4 can)."
    : `The page cannot be shown: ${error.message}`;
  byId("main").replaceChildren(message);
  throw error;
});
