// Answers as elements. Texts of a recording, such as names of functions and files, become text, never HTML.

/** An element with texts and elements in it. */
export function element(name, properties = {}, ...content) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...content);
  return made;
}

/** A table of texts. The names of columns with numbers begin with `>`. */
export function tableElement({ title, columns, rows }) {
  const isNumber = columns.map((column) => column.startsWith(">"));
  const row = (cells, name) => element("tr", {}, ...cells.map((text, at) =>
    element(name, { className: isNumber[at] ? "number" : "" }, text)));
  const head = element("thead", {}, row(columns.map((column) => column.replace(/^>/, "")), "th"));
  const body = element("tbody", {}, ...rows.map((cells) => row(cells, "td")));
  return element("section", {}, element("h3", {}, title),
    element("div", { className: "table" }, element("table", {}, head, body)));
}

function paragraphs(texts, className = "") {
  return texts.map((text) => element("p", { className }, text));
}

function adviceElement(advice) {
  const item = ({ paragraph, lines }) => {
    const apply = lines.length > 0 ? [element("pre", {}, lines.join("\n"))] : [];
    return element("li", {}, element("p", {}, paragraph), ...apply);
  };
  return element("section", {}, element("h3", {}, "What to do"), element("ol", {}, ...advice.map(item)));
}

/** The explanation of one device of a file. */
function deviceElement(file, device, several) {
  const { headline, sentences, advice, tables, remarks, object } = device;
  const name = several ? `${file}, GPU ${object.device}` : file;
  const made = element("section", { className: "device" },
    element("h2", { className: "headline" }, `${name}: ${headline}`), ...paragraphs(sentences));
  if (advice.length > 0) made.append(adviceElement(advice));
  made.append(...tables.map(tableElement));
  made.append(...paragraphs(remarks.map((remark) => `Remark: ${remark}.`), "note"));
  made.dataset.verdict = object.verdict;
  return made;
}

/** One file: its devices, or why there is no answer. `actions` are buttons about the file. */
export function fileElement({ file, devices, error }, actions) {
  if (error) return element("article", {}, element("p", { className: "problem" }, error.message));
  const several = devices.length > 1;
  return element("article", {}, ...devices.map((device) => deviceElement(file, device, several)),
    element("div", { className: "tools" }, ...actions));
}

/** Several files: who limits, in what they differ, and tables. */
export function ranksElement({ headline, sentences, tables }) {
  return element("article", {}, element("h2", {}, headline), ...paragraphs(sentences), ...tables.map(tableElement));
}

/** What two files hold at their moments. */
export function differenceElement({ title, devices }) {
  const device = ({ headline, sentences }) => [element("p", {}, `${headline}.`), ...paragraphs(sentences)];
  return element("article", {}, element("h2", {}, title), ...devices.flatMap(device));
}
