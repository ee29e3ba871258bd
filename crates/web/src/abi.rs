//! What the module imports and exports. Numbers that may not fit in 32 bits are `f64`, JavaScript's own.

use std::io::{self, Read};

use serde_json::{Value, json};
use warpool_report::request::{Call, Source, Stream};

#[link(wasm_import_module = "page")]
unsafe extern "C" {
    /// Copies up to `bytes` bytes of a file from `offset` on to `into`, and returns how many; a negative number if the
    /// file cannot be read.
    fn read(file: u32, offset: f64, into: *mut u8, bytes: usize) -> i32;
    /// The progress: a stage (0 none, 1 reading, 2 replaying, 3 writing a page), how much is done and of how much.
    safe fn progress(stage: u32, done: f64, total: f64);
    /// What a panic says. The module traps after it.
    fn panicked(text: *const u8, bytes: usize);
}

/// Memory for a request of `bytes` bytes.
#[unsafe(no_mangle)]
pub extern "C" fn request_memory(bytes: usize) -> *mut u8 {
    Box::leak(vec![0; bytes].into_boxed_slice()).as_mut_ptr()
}

/// Makes the answer. The request is that of `warpool_report::request`, with a list `files` of names and sizes; returns
/// the address of four numbers: where the JSON is and its bytes, and where the page is, with 0 bytes if there is none.
///
/// # Safety
/// `request` is from [`request_memory`], with as many bytes, and they have been written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn answer(request: *const u8, bytes: usize) -> *const usize {
    std::panic::set_hook(Box::new(|panic| {
        let text = panic.to_string();
        // SAFETY: the text has that many bytes, which do not change during the call.
        unsafe { panicked(text.as_ptr(), text.len()) };
    }));
    // SAFETY: the caller says so.
    let request = unsafe { std::slice::from_raw_parts(request, bytes) };
    let (json, page) = answered(request);
    let [json, page] = [json, page].map(|text| &*Box::leak(text.into_boxed_str()));
    let numbers = [json.as_ptr().addr(), json.len(), page.as_ptr().addr(), page.len()];
    Box::leak(Box::new(numbers)).as_ptr()
}

fn answered(request: &[u8]) -> (String, String) {
    let Ok(Value::Object(mut request)) = serde_json::from_slice(request) else {
        return (
            json!({ "error": { "kind": "internal", "message": "the request is no object" } }).to_string(),
            String::new(),
        );
    };
    let files = request.remove("files");
    let files: Vec<(String, u64)> = files.iter().flat_map(Value::as_array).flatten().filter_map(named).collect();
    let openers: Vec<_> = (0..).zip(&files).map(|(number, &(_, bytes))| move || opened(number, bytes)).collect();
    let named = files.iter().map(|(name, bytes)| (name.as_str(), *bytes));
    let open = openers.iter().map(|open| open as &(dyn Fn() -> Box<dyn Read> + Sync));
    let sources: Vec<Source<'_>> =
        named.zip(open).map(|((name, bytes), open)| Source::Stream(Stream { name, bytes, open })).collect();
    let call = Call::watched(|stage, done, total| progress(stage.into(), done as f64, total as f64));
    call.run(Value::Object(request).to_string().as_bytes(), &sources);
    call.into_texts()
}

fn named(file: &Value) -> Option<(String, u64)> {
    Some((file["name"].as_str()?.to_owned(), file["bytes"].as_u64()?))
}

fn opened(number: u32, bytes: u64) -> Box<dyn Read> {
    Box::new(PageFile { number, offset: 0, bytes })
}

/// A file that the page was given.
struct PageFile {
    number: u32,
    offset: u64,
    bytes: u64,
}

impl Read for PageFile {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let wanted = into.len().min(usize::try_from(self.bytes - self.offset).unwrap_or(usize::MAX));
        // SAFETY: `into` has room for as many bytes.
        let copied = unsafe { read(self.number, self.offset as f64, into.as_mut_ptr(), wanted) };
        let copied = usize::try_from(copied).ok().filter(|&copied| copied <= wanted && (copied > 0 || wanted == 0));
        let copied =
            copied.ok_or_else(|| io::Error::other("the browser cannot read the file; was it changed or moved?"))?;
        self.offset += copied as u64;
        Ok(copied)
    }
}
