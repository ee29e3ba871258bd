// Numbers as people read them: bytes in binary units, times, counts, and the steps of axes.

const UNITS = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];

/** Bytes in the largest binary unit that is not larger, with one decimal: the same words as the command prints. */
export function formatBytes(bytes) {
  const sign = bytes < 0 ? "−" : "";
  const size = Math.abs(bytes);
  const unit = UNITS.find(([, factor]) => size >= factor);
  if (!unit) return `${sign}${Math.round(size)} B`;
  const [name, factor] = unit;
  const value = size / factor;
  return `${sign}${Number.isInteger(value) ? value : oneDecimal(value)} ${name}`;
}

/** A difference in bytes, with its sign. */
export function signedBytes(bytes) {
  return `${bytes < 0 ? "" : "+"}${formatBytes(bytes)}`;
}

/** With one decimal; halves are rounded to even, as the command does. */
function oneDecimal(value) {
  const tenths = Math.floor(value * 10);
  const isHalf = value * 10 - tenths === 0.5;
  return ((isHalf ? tenths + (tenths % 2) : Math.round(value * 10)) / 10).toFixed(1);
}

/** A count with thousands separated. */
export function formatCount(count) {
  return Math.round(count).toString().replace(/\B(?=(\d{3})+$)/g, ",");
}

/** Microseconds as a time. */
export function formatTime(us) {
  const seconds = us / 1e6;
  if (Math.abs(seconds) >= 600) {
    const whole = Math.floor(seconds);
    const rest = String(whole % 60).padStart(2, "0");
    return whole >= 3600
      ? `${Math.floor(whole / 3600)}:${String(Math.floor(whole / 60) % 60).padStart(2, "0")}:${rest} h`
      : `${Math.floor(whole / 60)}:${rest} min`;
  }
  if (Math.abs(seconds) >= 1) return `${seconds.toFixed(2)} s`;
  if (Math.abs(us) >= 1000) return `${(us / 1000).toFixed(2)} ms`;
  return `${Math.round(us)} µs`;
}

/** A share of a whole in percent. */
export function formatShare(part, whole) {
  return whole > 0 ? `${((100 * part) / whole).toFixed(1)} %` : "–";
}

/** Round steps of an axis for bytes: powers of two, so that the labels are whole numbers of a unit. */
export function byteTicks(max, count) {
  if (!(max > 0)) return [0];
  const step = 2 ** Math.ceil(Math.log2(Math.max(1, max / count)));
  const ticks = [];
  for (let tick = 0; tick <= max; tick += step) ticks.push(tick);
  return ticks;
}

/** Round steps of an axis for counts or microseconds: 1, 2 or 5 times a power of ten. */
export function roundTicks(from, to, count) {
  const rough = Math.max((to - from) / Math.max(1, count), 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough);
  const ticks = [];
  for (let tick = Math.ceil(from / step) * step; tick <= to; tick += step) ticks.push(tick);
  return { ticks, step };
}

/** The label of a time on an axis that ends at `end`, with steps of `step` microseconds. */
export function axisTime(us, step, end) {
  const [factor, unit] = end >= 1e6 ? [1e6, "s"] : end >= 1e3 ? [1e3, "ms"] : [1, "µs"];
  // As many decimals as tell neighbours apart.
  const decimals = Math.max(0, Math.ceil(Math.log10(factor / step)));
  return `${(us / factor).toFixed(decimals)} ${unit}`;
}
