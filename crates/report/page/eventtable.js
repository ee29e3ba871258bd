// The list of events around the cursor. Only the visible rows exist as elements, however long the recording is; the
// list follows the cursor, and the cursor the list.

import { ACTIONS, EventRows } from "./eventrows.js";
import { findFrames } from "./search.js";
import { formatBytes, formatCount } from "./format.js";
import { make } from "./dom.js";

const EVENT_ROW = 26;
/** Browsers limit the height of an element; a longer list scrolls faster than its rows. */
const SCROLL_HEIGHT_MAX = 4_000_000;
const EVENT_COLUMNS = [
  ["event", "number"], ["time, s", "number"], ["action", ""], ["bytes", "number"], ["address", "address"],
  ["stream, pool", "place"], ["who", "who"],
];

export class EventTable {
  constructor({ scroll, note, action, text }, view, onPin) {
    Object.assign(this, { scroll, note, action, text, view, onPin });
    this.first = 0;
    this.body = make("tbody");
    const head = make("tr", "", ...EVENT_COLUMNS.map(([name, kind]) => make("th", kind, name)));
    this.table = make("table", "events", make("thead", "", head), this.body);
    this.table.setAttribute("role", "grid");
    this.table.setAttribute("aria-label", "Events around the cursor");
    this.spacer = make("div", "spacer", this.table);
    scroll.append(this.spacer);
    action.replaceChildren(new Option("all actions", "-1"), ...ACTIONS.map((name, at) => new Option(name, String(at))));
    action.addEventListener("change", () => this.filter());
    text.addEventListener("input", () => this.filter());
    scroll.addEventListener("scroll", () => this.scrolled());
    scroll.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    scroll.addEventListener("keydown", (event) => this.key(event));
    this.body.addEventListener("click", (event) => this.click(event));
    this.body.addEventListener("dblclick", () => this.pinCurrent());
    new ResizeObserver(() => this.draw()).observe(scroll);
    // Making millions of rows takes a moment, which a reader who never scrolls here does not wait for.
    this.isRevealed = false;
    const reveal = (entries) => entries.some((entry) => entry.isIntersecting) && this.reveal();
    new IntersectionObserver(reveal, { rootMargin: "300px" }).observe(scroll);
    view.listen(["recording"], () => this.open());
    view.listen(["cursor"], () => this.follow());
  }

  open() {
    this.made = null;
    if (this.isRevealed) this.filter();
  }

  reveal() {
    if (this.isRevealed) return;
    this.isRevealed = true;
    this.filter();
  }

  get rows() {
    this.made ??= new EventRows(this.view.recording);
    return this.made;
  }

  filter() {
    const { recording } = this.view;
    this.list = this.rows.filtered(Number(this.action.value), this.matcher(this.text.value.trim().toLowerCase()));
    const left = recording.info.figures.allocations_left_out;
    const events = this.rows.count - this.rows.retries;
    const shown = this.list.length < this.rows.count ? `${formatCount(this.list.length)} shown of ` : "";
    this.note.textContent =
      `${shown}${formatCount(events)} events` +
      (left > 0 ? `; those of ${formatCount(left)} small allocations are left out, to keep the page small` : "");
    this.table.setAttribute("aria-rowcount", String(this.list.length + 1));
    this.spacer.style.height = `${Math.min(SCROLL_HEIGHT_MAX, (this.list.length + 1) * EVENT_ROW)}px`;
    this.follow();
  }

  /** Whether a text is in a row's stack, its address, or its action. */
  matcher(text) {
    if (!text) return null;
    const { rows } = this;
    const { stacks } = this.view.recording;
    const { matches, nodes } = findFrames(this.view.recording, text);
    const isAction = ACTIONS.map((action) => action.includes(text));
    // A million addresses as text take seconds, so only what can be one is compared.
    const isAddress = /^0?x?[0-9a-f]{4,}$/.test(text);
    return (row) => {
      const allocation = rows.allocationOf(row);
      if (isAction[rows.action[row]] || (allocation >= 0 && matches[allocation])) return true;
      const stack = allocation < 0 ? rows.stackOf(row) : 0;
      if (stack && nodes[stacks.node[stack - 1]]) return true;
      return isAddress && `0x${(rows.addressOf(row) ?? 0).toString(16)}`.includes(text);
    };
  }

  /** How many rows fit below the head. */
  get visible() {
    return Math.max(1, Math.floor(this.scroll.clientHeight / EVENT_ROW) - 1);
  }

  get firstMax() {
    return Math.max(0, this.list.length - this.visible);
  }

  /** Shows the row of the cursor, in the middle unless it is visible already. */
  follow() {
    if (!this.isRevealed) return;
    this.current = this.rows.rowAt(this.view.cursor, this.list);
    const { current, visible } = this;
    if (current < this.first || current >= this.first + visible) this.first = current - (visible >> 1);
    this.show(this.first);
  }

  show(first) {
    this.first = Math.round(Math.min(this.firstMax, Math.max(0, first)));
    const space = this.spacer.offsetHeight - this.scroll.clientHeight;
    const top = this.firstMax > 0 ? (this.first / this.firstMax) * Math.max(0, space) : 0;
    // The element rounds what it is told; what it makes of it is not a scroll of the reader's.
    this.scroll.scrollTop = top;
    this.expected = this.scroll.scrollTop;
    this.draw();
  }

  scrolled() {
    if (Math.abs(this.scroll.scrollTop - this.expected) < 1) return;
    this.expected = this.scroll.scrollTop;
    const space = this.spacer.offsetHeight - this.scroll.clientHeight;
    this.first = space > 0 ? Math.round((this.scroll.scrollTop / space) * this.firstMax) : 0;
    this.draw();
  }

  /** A wheel moves by rows where the scroll bar would skip some. */
  wheel(event) {
    if ((this.list.length + 1) * EVENT_ROW <= SCROLL_HEIGHT_MAX || event.ctrlKey) return;
    event.preventDefault();
    this.show(this.first + Math.sign(event.deltaY) * Math.max(1, Math.round(Math.abs(event.deltaY) / EVENT_ROW)));
  }

  draw() {
    if (!this.list || this.scroll.clientHeight === 0) return;
    const count = Math.min(this.visible, this.list.length - this.first);
    const elements = Array.from({ length: Math.max(0, count) }, (_, at) => this.rowElement(this.first + at));
    if (elements.length === 0) elements.push(make("tr", "", make("td", "who", "No event is listed.")));
    this.body.replaceChildren(...elements);
    const chosen = this.body.querySelector("[aria-selected=true]");
    if (chosen) this.scroll.setAttribute("aria-activedescendant", chosen.id);
    else this.scroll.removeAttribute("aria-activedescendant");
  }

  rowElement(at) {
    const { rows } = this;
    const row = this.list[at];
    const addr = rows.addressOf(row);
    const texts = [
      rows.isEvent(row) ? formatCount(rows.position[row] - 1) : "",
      (this.view.recording.timeOf(rows.position[row]) / 1e6).toFixed(6),
      ACTIONS[rows.action[row]],
      formatBytes(rows.bytesOf(row)),
      addr === null ? "" : `0x${addr.toString(16)}`,
      rows.placeOf(row),
      rows.textOf(row),
    ];
    const cells = texts.map((text, column) => make("td", EVENT_COLUMNS[column][1], text));
    cells.at(-1).title = [rows.textOf(row), ...this.view.recording.contextLines(rows.position[row])].join("\n");
    const element = make("tr", "", ...cells);
    element.id = `event-row-${at}`;
    element.dataset.at = at;
    element.setAttribute("aria-rowindex", String(at + 2));
    element.setAttribute("aria-selected", String(at === this.current));
    return element;
  }

  click(event) {
    const row = event.target.closest("tr[data-at]");
    if (row) this.moveTo(Number(row.dataset.at));
  }

  moveTo(at) {
    if (this.list.length === 0) return;
    const row = this.list[Math.min(this.list.length - 1, Math.max(0, at))];
    this.view.moveCursor(this.rows.position[row]);
  }

  pinCurrent() {
    const allocation = this.current >= 0 ? this.rows.allocationOf(this.list[this.current]) : -1;
    if (allocation >= 0) this.onPin(allocation);
  }

  key(event) {
    this.reveal();
    const page = this.visible - 1;
    const steps = { ArrowUp: -1, ArrowDown: 1, PageUp: -page, PageDown: page };
    if (event.key in steps) this.moveTo(this.current + steps[event.key]);
    else if (event.key === "Enter") this.pinCurrent();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}
