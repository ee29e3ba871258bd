// Small helpers for elements. Content is text, never markup: recordings may contain anything.

/** An element of the page by its id. */
export function byId(id) {
  return document.getElementById(id);
}

/** An element with a class and text or children. */
export function make(tag, className, ...content) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...content);
  return element;
}

/** A small square of a colour. */
export function swatch(colour) {
  const square = make("i");
  square.style.background = colour;
  return square;
}

/** A button that calls `act`. */
export function makeButton(label, act, title = "") {
  const button = make("button", "", label);
  button.type = "button";
  if (title) button.title = title;
  button.addEventListener("click", act);
  return button;
}

/** Copies a text, and says so on the button for a moment. */
export async function copyText(text, button) {
  const label = (button.dataset.label ??= button.textContent);
  const isCopied = await writeClipboard(text);
  button.textContent = isCopied ? "Copied" : "Cannot copy";
  setTimeout(() => (button.textContent = label), 1500);
}

/** Pages from a file may not have the clipboard's interface; then a selection is copied. */
async function writeClipboard(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = make("textarea", "offscreen");
    area.value = text;
    document.body.append(area);
    area.select();
    const isCopied = document.execCommand("copy");
    area.remove();
    return isCopied;
  }
}
