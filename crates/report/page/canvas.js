// Canvases that are sharp on every screen, and drawn once per frame.

/** A canvas that fills its element's width, with its context in CSS pixels. */
export class Surface {
  /** Calls `draw(context, width, height)`; `height` may be a function. */
  constructor(canvas, draw) {
    this.canvas = canvas;
    this.draw = draw;
    this.isQueued = false;
    this.height = null;
    new ResizeObserver(() => this.redraw()).observe(canvas.parentElement);
  }

  /** Draws before the next frame; several calls are one. */
  redraw() {
    if (this.isQueued) return;
    this.isQueued = true;
    requestAnimationFrame(() => {
      this.isQueued = false;
      this.drawNow();
    });
  }

  drawNow() {
    const { canvas } = this;
    const width = canvas.parentElement.clientWidth;
    if (width === 0) return;
    const height = this.height ? this.height(width) : canvas.clientHeight;
    const scale = devicePixelRatio || 1;
    const [pixelWidth, pixelHeight] = [Math.round(width * scale), Math.round(height * scale)];
    if (canvas.width !== pixelWidth || canvas.height !== pixelHeight) {
      canvas.width = pixelWidth;
      canvas.height = pixelHeight;
      if (this.height) canvas.style.height = `${height}px`;
    }
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    this.draw(context, width, height);
  }
}

/** Text that is cut to a width. */
export function fitText(context, text, width) {
  if (width < 14) return "";
  if (context.measureText(text).width <= width) return text;
  let [low, high] = [0, text.length];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (context.measureText(`${text.slice(0, middle)}…`).width <= width) low = middle;
    else high = middle - 1;
  }
  return low > 1 ? `${text.slice(0, low)}…` : "";
}

/** The place of a pointer within an element. */
export function pointerIn(event, element) {
  const box = element.getBoundingClientRect();
  return { x: event.clientX - box.left, y: event.clientY - box.top };
}
