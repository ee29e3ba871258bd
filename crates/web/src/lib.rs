//! Answers about recordings in the browser: the same code as the command's, compiled to WebAssembly. `web/worker.js`
//! loads it in a worker, and `web/main.js` shows the answers; `scripts/web` builds all.
//!
//! The interface (`abi.rs`) has no generated code on either side: a request goes in and an answer comes out, both as
//! text, and the module calls back for the bytes of a file and to tell its progress. An instance makes one answer, so
//! it frees nothing: its memory goes with its worker.

#[cfg(all(target_family = "wasm", target_os = "unknown"))]
mod abi;
