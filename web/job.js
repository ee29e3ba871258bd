// Requests to the module, each in a worker of its own.

/** The module, compiled once. */
let compiled = null;

function loadModule() {
  compiled ??= compileModule().catch((error) => {
    compiled = null;
    throw error;
  });
  return compiled;
}

async function compileModule() {
  const answer = await fetch("warpool.wasm");
  if (!answer.ok) throw new Error(`warpool.wasm cannot be loaded: ${answer.status} ${answer.statusText}`);
  // Streaming needs the media type application/wasm, which not every server knows.
  if (answer.headers.get("Content-Type") === "application/wasm") return WebAssembly.compileStreaming(answer);
  return WebAssembly.compile(await answer.arrayBuffer());
}

/** A request under way. `done` is a promise of the answer: its objects, its page if there is one, and its cost. */
export class Job {
  constructor(request, files, onProgress) {
    this.worker = null;
    this.isCancelled = false;
    this.done = this.run(request, files, onProgress);
  }

  async run(request, files, onProgress) {
    const started = performance.now();
    const module = await loadModule();
    if (this.isCancelled) return new Promise(() => {});
    this.worker = new Worker("worker.js");
    const { result, page, memoryBytes } = await new Promise((resolve, reject) => {
      this.worker.onmessage = ({ data }) => (data.progress ? onProgress(data.progress) : resolve(data));
      this.worker.onerror = (event) => reject(new Error(event.message || "the worker cannot be loaded"));
      this.worker.postMessage({ module, request, files });
    });
    this.worker.terminate();
    if (result.error) throw new Error(result.error.message);
    return { result, page, memoryBytes, seconds: (performance.now() - started) / 1000 };
  }

  /** Ends it; its promise is never settled. */
  cancel() {
    this.isCancelled = true;
    this.worker?.terminate();
  }
}
