//! The page: one HTML file with everything in it. Its sources are in `crates/report/page`, ordinary files that a
//! browser could load as they are; here they are joined.

use std::io::{self, Read as _, Write};
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::sections::Section;

macro_rules! scripts {
    ($($file:literal)*) => { [$(include_str!(concat!("../../page/", $file)),)*] };
}

/// The scripts, each after those that it imports.
const SCRIPTS: [&str; 28] = scripts!(
    "format.js" "dom.js" "decode.js" "recording.js" "theme.js" "colours.js" "canvas.js" "tooltip.js" "view.js"
    "search.js" "columns.js" "layers.js" "timeline.js" "bands.js" "map.js" "pin.js" "flame.js" "holders.js"
    "regions.js" "eventrows.js" "eventtable.js" "summary.js" "hash.js" "report.js" "difference.js" "ranks.js"
    "keyboard.js" "main.js"
);
const STYLE: &str = include_str!("../../page/style.css");
const TEMPLATE: &str = include_str!("../../page/index.html");

/// The start of a page, which distinguishes our pages from other files.
const START: &str = "<!doctype html>\n<!-- warpool report";

/// A page to be written.
pub struct Page {
    /// The title.
    pub title: String,
    /// The data for the script.
    pub manifest: Value,
    /// The data.
    pub sections: Vec<Section>,
}

impl Page {
    /// Writes the page to a file, all or nothing. An existing page is replaced, any other file is not. Returns its
    /// size.
    ///
    /// # Errors
    /// If it cannot be written, with the reason as a sentence.
    pub fn write(&self, file: &Path) -> Result<u64, String> {
        let error = |error: &io::Error| format!("cannot write {}: {error}", file.display());
        if file.is_dir() {
            return Err(format!("cannot write {}: it is a folder", file.display()));
        }
        if file.is_file() && !is_page(file).map_err(|it| error(&it))? {
            return Err(format!(
                "{} exists and is not a report of warpool: remove it, or name another file",
                file.display()
            ));
        }
        // A pipe or a terminal cannot be replaced by a file.
        if file.exists() && !file.is_file() {
            let mut out = std::fs::File::create(file).map_err(|it| error(&it))?;
            return self.write_to(&mut out).map_err(|it| error(&it));
        }
        let draft = draft_name(file);
        let written = std::fs::File::create(&draft).and_then(|out| {
            let mut out = io::BufWriter::new(out);
            let bytes = self.write_to(&mut out)?;
            out.into_inner()?.sync_all()?;
            std::fs::rename(&draft, file)?;
            Ok(bytes)
        });
        written.map_err(|it| {
            let _ = std::fs::remove_file(&draft);
            error(&it)
        })
    }

    /// The page as a text.
    #[must_use]
    pub fn to_html(&self) -> String {
        let mut out = Vec::new();
        self.write_to(&mut out).expect("writing to memory succeeds");
        String::from_utf8(out).expect("the page is text")
    }

    fn write_to(&self, out: &mut dyn Write) -> io::Result<u64> {
        let mut counted = Counted { out, bytes: 0 };
        let mut rest = TEMPLATE;
        // Text of the page is never searched again, so data cannot contain a marker.
        while let Some((before, behind)) = rest.split_once("<!--{") {
            let (marker, behind) = behind.split_once("}-->").expect("the template closes its markers");
            counted.write_all(before.as_bytes())?;
            self.fill(marker, &mut counted)?;
            rest = behind;
        }
        counted.write_all(rest.as_bytes())?;
        counted.flush()?;
        Ok(counted.bytes)
    }

    fn fill(&self, marker: &str, out: &mut dyn Write) -> io::Result<()> {
        match marker {
            "title" => write!(out, "{}", escaped(&self.title)),
            "style" => write!(out, "<style>{}</style>", style()),
            "data" => {
                // Within a script element only `<` matters.
                let manifest = self.manifest.to_string().replace('<', "\\u003c");
                writeln!(out, "<script type=\"application/json\" id=\"manifest\">{manifest}</script>")?;
                for Section { id, text } in &self.sections {
                    writeln!(out, "<script type=\"text/plain\" id=\"{id}\">{text}</script>")?;
                }
                Ok(())
            }
            "script" => write!(out, "<script type=\"module\">{}</script>", joined_scripts()),
            _ => unreachable!("the template has an unknown marker {marker}"),
        }
    }
}

/// The texts of the script and of the style that are in every page, for a `Content-Security-Policy` that allows them by
/// their hashes.
#[must_use]
pub fn inline_sources() -> [String; 2] {
    [joined_scripts(), style()]
}

fn style() -> String {
    format!("\n{STYLE}")
}

/// All scripts as one: without imports, since everything is in one scope then.
fn joined_scripts() -> String {
    let lines = SCRIPTS.iter().flat_map(|script| script.lines());
    let kept = lines.filter(|line| !line.starts_with("import "));
    std::iter::once("\n".to_owned())
        .chain(kept.map(|line| format!("{}\n", line.strip_prefix("export ").unwrap_or(line))))
        .collect()
}

fn is_page(file: &Path) -> io::Result<bool> {
    let mut start = Vec::new();
    std::fs::File::open(file)?.take(START.len() as u64).read_to_end(&mut start)?;
    // An empty file has nothing to lose.
    Ok(start.is_empty() || start == START.as_bytes())
}

/// A file name in the same folder, unique to this process.
fn draft_name(file: &Path) -> PathBuf {
    let mut name = file.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.part", std::process::id()));
    file.with_file_name(name)
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

struct Counted<'a> {
    out: &'a mut dyn Write,
    bytes: u64,
}

impl Write for Counted<'_> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let written = self.out.write(buffer)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_are_in_the_order_of_their_imports_and_names_are_unique() {
        let mut declared = Vec::new();
        for script in SCRIPTS {
            for line in script.lines() {
                assert!(!line.contains("</script"), "it would end the script: {line}");
                if let Some(names) = line.strip_prefix("import {").and_then(|rest| rest.split_once('}')) {
                    for name in names.0.split(',').map(str::trim) {
                        assert!(declared.contains(&name.to_owned()), "{name} is imported before it is declared");
                    }
                    assert!(line.ends_with(';'), "an import is one line: {line}");
                }
                let line = line.strip_prefix("export ").unwrap_or(line);
                let line = line.strip_prefix("async ").unwrap_or(line);
                let name = ["function ", "const ", "class ", "let "].iter().find_map(|it| line.strip_prefix(it));
                let Some(name) = name else { continue };
                let name: String =
                    name.chars().take_while(|&letter| letter.is_alphanumeric() || letter == '_').collect();
                assert!(!declared.contains(&name), "{name} is declared twice");
                declared.push(name);
            }
        }
    }

    #[test]
    fn data_cannot_leave_its_element() {
        let manifest = serde_json::json!({ "title": "</script><b>" });
        let page = Page { title: "a<b>&\"".to_owned(), manifest, sections: Vec::new() };
        let mut out = Vec::new();
        let bytes = page.write_to(&mut out).expect("memory");
        let text = String::from_utf8(out).expect("text");
        assert_eq!(bytes, text.len() as u64);
        assert!(text.starts_with(START), "pages are known by their start");
        assert!(text.contains("<title>a&lt;b&gt;&amp;&quot;"), "the title is escaped");
        assert!(!text.contains("</script><b>") && text.contains("\\u003c/script>"));
        assert!(!text.contains("<!--{"), "every marker is filled");
        for source in ["http://", "https://"] {
            assert!(!text.contains(source), "the page refers to {source}");
        }
    }
}
