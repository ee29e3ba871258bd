// From the text inside the page to columns of numbers: base64, deflate, variable-length integers.
// crates/report/src/view/columns.rs writes what is read here.

/** The bytes of a section of the page. */
async function inflateSection(id) {
  const element = document.getElementById(id);
  if (!element) throw new Error(`the page has no section ${id}`);
  const text = atob(element.textContent.trim());
  element.textContent = ""; // Its memory is no longer needed.
  const packed = new Uint8Array(text.length);
  for (let at = 0; at < text.length; at++) packed[at] = text.charCodeAt(at);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Reads columns in the order in which they were written. */
export class ColumnReader {
  constructor(bytes) {
    this.bytes = bytes;
    this.at = 0;
  }

  static async open(id) {
    return new ColumnReader(await inflateSection(id));
  }

  /** A number: seven bits in each byte, the lowest first. */
  number() {
    const single = new Float64Array(1);
    this.fill(single);
    return single[0];
  }

  /** A column of numbers, its length first. */
  column(type = Float64Array) {
    const values = new type(this.number());
    this.fill(values);
    return values;
  }

  /** A column of which each number is the difference to the one before, with its sign in the lowest bit. */
  sums(type = Float64Array) {
    const differences = this.column();
    const values = type === Float64Array ? differences : new type(differences.length);
    let sum = 0;
    for (let at = 0; at < values.length; at++) {
      const value = differences[at];
      // Bits beyond the 32nd are lost in integer arithmetic.
      if (value < 2 ** 31) sum += (value >>> 1) ^ -(value & 1);
      else sum += value % 2 === 0 ? value / 2 : -(value + 1) / 2;
      values[at] = sum;
    }
    return values;
  }

  /** Millions of numbers are read here while the page opens: integers as far as they go, local variables. */
  fill(values) {
    const { bytes } = this;
    let { at } = this;
    for (let index = 0; index < values.length; index++) {
      let byte = bytes[at++];
      let value = byte & 127;
      for (let shift = 7; byte >= 128 && shift < 28; shift += 7) {
        byte = bytes[at++];
        value |= (byte & 127) << shift;
      }
      for (let factor = 2 ** 28; byte >= 128; factor *= 128) {
        byte = bytes[at++];
        value += (byte & 127) * factor;
      }
      values[index] = value;
    }
    this.at = at;
  }

  /** All of the rest as JSON. */
  json() {
    return JSON.parse(new TextDecoder().decode(this.bytes.subarray(this.at)));
  }
}
