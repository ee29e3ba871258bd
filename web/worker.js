// Makes one answer, in a worker of its own: it may be ended at any time, and its memory goes with it.
// The module's side of the interface is crates/web/src/abi.rs.

/** How much of a file is read at once. */
const PIECE_BYTES = 4 << 20;
/** How often the progress is told. */
const PROGRESS_MS = 50;

/** The bytes of the files, in pieces, as the module asks for them. */
class Files {
  constructor(files) {
    this.files = files;
    this.reader = new FileReaderSync();
    this.number = -1;
    this.offset = 0;
    this.piece = new Uint8Array();
  }

  /** Up to `bytes` bytes of a file; empty only at its end. */
  bytesAt(number, offset, bytes) {
    const isInPiece = number === this.number && offset >= this.offset && offset < this.offset + this.piece.length;
    if (!isInPiece) {
      const blob = this.files[number].slice(offset, offset + PIECE_BYTES);
      this.piece = new Uint8Array(this.reader.readAsArrayBuffer(blob));
      this.number = number;
      this.offset = offset;
    }
    const start = offset - this.offset;
    return this.piece.subarray(start, start + bytes);
  }
}

async function answer({ module, request, files }) {
  const open = new Files(files);
  let memory = null;
  let panic = "";
  let toldAt = -Infinity;
  let toldStage = -1;
  // Addresses come as signed numbers.
  const view = (address, bytes) => new Uint8Array(memory.buffer, address >>> 0, bytes >>> 0);
  const text = (address, bytes) => new TextDecoder().decode(view(address, bytes));
  const page = {
    read(number, offset, into, bytes) {
      try {
        const found = open.bytesAt(number, offset, bytes >>> 0);
        view(into, found.length).set(found);
        return found.length;
      } catch {
        return -1;
      }
    },
    progress(stage, done, total) {
      const now = performance.now();
      if (stage === toldStage && now - toldAt < PROGRESS_MS) return;
      toldAt = now;
      toldStage = stage;
      postMessage({ progress: { stage, done, total } });
    },
    panicked(address, bytes) {
      panic = text(address, bytes);
    },
  };
  const { exports } = await WebAssembly.instantiate(module, { page });
  memory = exports.memory;
  const named = files.map(({ name, size }) => ({ name, bytes: size }));
  const asked = new TextEncoder().encode(JSON.stringify({ ...request, files: named }));
  const requestAddress = exports.request_memory(asked.length);
  view(requestAddress, asked.length).set(asked);
  try {
    // The call makes the memory grow, which makes another buffer of it.
    const numbers = exports.answer(requestAddress, asked.length) >>> 0;
    const [json, jsonBytes, html, htmlBytes] = new Uint32Array(memory.buffer, numbers, 4);
    const result = JSON.parse(text(json, jsonBytes));
    const written = htmlBytes > 0 ? memory.buffer.slice(html, html + htmlBytes) : null;
    postMessage({ result, page: written, memoryBytes: memory.buffer.byteLength }, written ? [written] : []);
  } catch (error) {
    const isFull = !panic && memory.buffer.byteLength > 2 ** 31;
    fail(isFull ? "it needs more memory than a page can have: use the command `warpool`"
      : `internal error, please report it: ${panic || error}`);
  }
}

function fail(message) {
  postMessage({ result: { error: { kind: "internal", message } }, page: null, memoryBytes: 0 });
}

onmessage = ({ data }) => {
  answer(data).catch((error) => fail(String(error)));
};
