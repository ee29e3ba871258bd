// The page: takes snapshots, has them answered in a worker, and shows the answers.

import { differenceElement, element, fileElement, ranksElement } from "./answer.js";
import { Job } from "./job.js";

const STAGES = ["Starting", "Reading", "Replaying", "Writing the page"];
const EXAMPLE = "example.pickle.xz";

const byId = (id) => document.getElementById(id);

/** What is shown: the files, the answer about them, and the request under way. For tests, too. */
const shown = { files: [], answer: null, page: null, cost: null, job: null };
globalThis.warpool = shown;

/** Tells what the page does: `idle`, `busy`, `answered` or `failed`. */
function setState(state) {
  document.documentElement.dataset.state = state;
}

/** Makes a request, with its progress. The result is undefined if it failed: the reason is shown then. */
async function ask(command, options, files, label) {
  shown.job?.cancel();
  showProblem("");
  setState("busy");
  let stage = 0;
  let file = -1;
  const job = new Job({ command, options }, files, (progress) => {
    if (progress.stage === 1 && stage !== 1) file += 1;
    stage = progress.stage;
    const name = files.length > 1 && file >= 0 ? files[Math.min(file, files.length - 1)].name : label;
    showProgress(`${STAGES[stage]} ${name}`, progress);
  });
  shown.job = job;
  showProgress(`${STAGES[0]} ${label}`, { done: 0, total: 0 });
  try {
    const found = await job.done;
    if (shown.job !== job) return undefined;
    setState("answered");
    shown.cost = { seconds: found.seconds, memoryBytes: found.memoryBytes };
    const mebibytes = Math.ceil(found.memoryBytes / 2 ** 20);
    byId("cost").textContent = `Answered here in ${found.seconds.toFixed(1)} s, with ${mebibytes} MiB of memory.`;
    return found;
  } catch (error) {
    if (shown.job !== job) return undefined;
    setState("failed");
    showProblem(error.message);
    return undefined;
  } finally {
    if (shown.job === job) {
      shown.job = null;
      byId("work").hidden = true;
    }
  }
}

function showProgress(text, { done, total }) {
  byId("work").hidden = false;
  byId("doing").textContent = text;
  const bar = byId("progress");
  // Without a value it only moves.
  if (total > 0) bar.value = Math.min(1, done / total);
  else bar.removeAttribute("value");
}

function showProblem(text) {
  byId("problem").textContent = text;
  byId("problem").hidden = text === "";
}

/** Files with names of their own: two folders may have files of one name. */
function distinct(files) {
  const seen = new Map();
  return files.map((file) => {
    const count = (seen.get(file.name) ?? 0) + 1;
    seen.set(file.name, count);
    return count === 1 ? file : new File([file], `${file.name} (${count})`);
  });
}

function device() {
  const gpu = byId("gpu").value;
  return gpu === "" ? {} : { gpu };
}

/** Explains the files. */
async function explain(files) {
  shown.files = distinct([...files]);
  if (shown.files.length === 0) return;
  byId("answer").replaceChildren();
  closeViewer();
  shown.answer = null;
  const label = shown.files.length === 1 ? shown.files[0].name : `${shown.files.length} files`;
  const found = await ask("explain_files", device(), shown.files, label);
  if (!found) return;
  shown.answer = found.result;
  const { files: explained, ranks } = found.result;
  const articles = explained.map((of, at) => fileElement(of, [
    element("button", { type: "button", className: "view", onclick: () => view(shown.files[at]) }, "Memory over time"),
  ]));
  if (ranks) articles.unshift(ranksElement(ranks));
  if (shown.files.length > 1) articles.unshift(comparison(shown.files));
  byId("answer").replaceChildren(...articles);
}

/** The choice of two files to compare. */
function comparison(files) {
  const choice = (label, chosen) => {
    const options = files.map(({ name }, at) => element("option", { value: at, selected: at === chosen }, name));
    return element("select", { ariaLabel: label }, ...options);
  };
  const [before, after] = [choice("First recording", 0), choice("Second recording", 1)];
  const compare = () => difference(files[before.value], files[after.value]);
  return element("article", { className: "tools" }, "Compare", before, "with", after,
    element("button", { type: "button", id: "compare", onclick: compare }, "Compare"));
}

/** The viewer of a file. */
async function view(file) {
  const found = await ask("view", device(), [file], file.name);
  if (found) openViewer(found.result.title, found.page);
}

/** The difference of two files, in sentences and in the viewer. */
async function difference(before, after) {
  const found = await ask("diff", { page: true }, [before, after], `${before.name} and ${after.name}`);
  if (!found) return;
  shown.difference = found.result;
  byId("difference")?.remove();
  const article = differenceElement(found.result);
  article.id = "difference";
  byId("answer").prepend(article);
  openViewer(found.result.title, found.page);
}

/** Opens a page in a frame without access to this one: it may run its own script, nothing else. */
function openViewer(title, html) {
  closeViewer();
  const address = URL.createObjectURL(new Blob([html], { type: "text/html" }));
  shown.page = address;
  const frame = element("iframe", { title: "Memory over time", allow: "clipboard-write", src: address });
  // Without allow-same-origin.
  frame.setAttribute("sandbox", "allow-scripts");
  byId("viewer-title").textContent = title;
  byId("save").href = address;
  byId("save").download = `${title.replace(/[^\w.-]+/g, "_")}.html`;
  byId("viewer").append(frame);
  byId("viewer").hidden = false;
  byId("viewer").scrollIntoView({ block: "start" });
}

function closeViewer() {
  if (shown.page) URL.revokeObjectURL(shown.page);
  shown.page = null;
  byId("viewer").querySelector("iframe")?.remove();
  byId("viewer").hidden = true;
}

async function example() {
  const answer = await fetch(EXAMPLE);
  if (!answer.ok) {
    showProblem(`the example cannot be loaded: ${answer.status} ${answer.statusText}`);
    return;
  }
  explain([new File([await answer.blob()], EXAMPLE)]);
}

/** The cards that a program can be tried on. */
async function listCards() {
  const { result } = await new Job({ command: "cards", options: {} }, [], () => {}).done;
  const text = ({ name, bytes }) => `${name} (${(bytes / 2 ** 30).toFixed(1)} GiB)`;
  byId("gpu").append(...result.cards.map((card) => element("option", { value: card.key }, text(card))));
}

/** Keeps the files of the page, so that it works offline. */
async function keepOffline() {
  if (!("serviceWorker" in navigator)) return;
  await navigator.serviceWorker.register("offline.js");
  await navigator.serviceWorker.ready;
  document.documentElement.dataset.offline = "ready";
  byId("offline").hidden = false;
}

byId("files").addEventListener("change", ({ target }) => {
  explain(target.files);
  // The same file may be chosen again.
  target.value = "";
});
byId("example").addEventListener("click", () => {
  example().catch((error) => showProblem(error.message));
});
byId("gpu").addEventListener("change", () => explain(shown.files));
byId("close").addEventListener("click", closeViewer);
byId("cancel").addEventListener("click", () => {
  shown.job?.cancel();
  shown.job = null;
  byId("work").hidden = true;
  setState("idle");
});
for (const kind of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(kind, (event) => {
    // Otherwise the browser would leave the page for the file.
    event.preventDefault();
    document.body.classList.toggle("is-over", kind === "dragover");
    if (kind === "drop") explain(event.dataTransfer.files);
  });
}
keepOffline().catch(() => {
  // Private windows may refuse it; the page works as long as it is open.
});
listCards().then(() => setState("idle"), (error) => {
  setState("failed");
  showProblem(error.message);
});
