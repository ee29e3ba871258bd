// The top of the report: the answer, what a change would give, and the moments that a reader can go to.

import { formatBytes, formatCount, formatTime } from "./format.js";
import { byId, copyText, make, makeButton } from "./dom.js";

/** The headline and the sentences of an explanation. */
export function fillProse({ headline, prose, remarks, figures }) {
  const heading = byId("headline");
  heading.textContent = headline[0].toUpperCase() + headline.slice(1);
  heading.className = figures.ooms > 0 ? "oom" : "";
  const lines = [...prose, ...remarks.map((remark) => `Remark: ${remark}.`)].filter(Boolean);
  byId("prose").replaceChildren(...lines.map((line) => make("p", "", line)));
}

/** A figure with its name. */
export function figure(name, value, detail = "") {
  const data = make("dd", "", value, " ", make("small", "", detail));
  data.dataset.figure = name.replaceAll(" ", "-");
  return make("div", "", make("dt", "", name), data);
}

/** Changes that a reader can make; `apply` is a line to copy. */
export function fillAdvice(advice) {
  byId("advice").hidden = advice.length === 0;
  byId("advice-list").replaceChildren(...advice.map(adviceItem));
}

function adviceItem({ title, detail, apply, fits, bytes_saved: saved, margin_bytes: margin }) {
  const item = make("li", "", make("b", "", title));
  if (fits !== null && fits !== undefined) {
    item.append(" ", make("span", fits ? "fits" : "fits-not", fits ? "fits" : "does not fit"));
  }
  const figures = [
    saved > 0 && `saves ${formatBytes(saved)}`,
    margin > 0 && `${formatBytes(margin)} to spare`,
  ].filter(Boolean);
  if (figures.length) item.append(" ", make("span", "note", figures.join(", ")));
  if (detail) item.append(make("p", "", detail));
  if (apply) {
    const copy = makeButton("Copy", () => copyText(apply, copy), "Copy this");
    copy.setAttribute("aria-label", `Copy: ${title}`);
    item.append(make("div", "apply", make("code", "", apply), copy));
  }
  return item;
}

/** Buttons that move the cursor, each with its bytes and what they count. `onGo(moment)` moves it. */
export function fillMoments(recording, onGo) {
  const { moments, events } = recording.info;
  const buttons = moments.map((moment) => {
    const { name, bytes, counts, position, requested_bytes: requested, allocated_bytes: allocated } = moment;
    const detail = name === "most allocated"
      ? `${counts}: ${formatBytes(requested)} + ${formatBytes(allocated - requested)}`
      : name === "most reserved" ? `of it ${formatBytes(allocated)} allocated` : counts;
    const when = events > 0 ? `at ${formatTime(recording.timeOf(position))}, event ${formatCount(position - 1)}` : "";
    const button = makeButton("", () => onGo(moment));
    const value = make("span", "value", formatBytes(bytes));
    button.append(make("span", "name", name), value, make("span", "detail", detail), make("span", "detail", when));
    button.dataset.moment = name.replaceAll(" ", "-");
    button.disabled = events === 0;
    return button;
  });
  byId("moments").replaceChildren(...buttons);
}

/** Shows which of the moments the cursor is at. */
export function markMoment(recording, cursor) {
  recording.info.moments.forEach(({ position }, at) => {
    byId("moments").children[at].setAttribute("aria-pressed", String(position === cursor));
  });
}
