//! Parts of the book's reference that are made from the code: errors from the enums of the crates `warpool` and
//! `driver`, the C interface from its header. A part stands between two comments in its page:
//!
//! ```text
//! <!-- from crates/warpool/src/error/graph.rs: GraphError -->
//! <!-- end -->
//! ```
//!
//! The pages of the command and of settings are made by tests of `warpool-cli` and `warpool`, which know more than the
//! source text.

use std::fmt::Write as _;
use std::path::Path;

use syn::{Attribute, Expr, Item, ItemEnum, Lit, Meta};

/// The pages with such parts.
const PAGES: [&str; 2] = ["docs/reference/errors.md", "docs/reference/c.md"];

/// Parts that are out of date; with `is_write` they are written instead.
pub fn check(root: &Path, is_write: bool) -> Result<Vec<String>, String> {
    let mut problems = Vec::new();
    for name in PAGES {
        let path = root.join(name);
        let page = read(&path)?;
        let made = with_parts(&page, &|source| part(root, source))?;
        println!("{name}: {} parts from the code", page.matches("<!-- from ").count());
        if made == page {
            continue;
        }
        if is_write {
            std::fs::write(&path, made).map_err(|error| format!("{name}: {error}"))?;
        } else {
            problems.push(format!("{name} is out of date: cargo run -p xtask -- reference --write"));
        }
    }
    Ok(problems)
}

fn read(path: &Path) -> Result<String, String> {
    std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
}

/// The page with each part made again.
fn with_parts(page: &str, part: &dyn Fn(&str) -> Result<String, String>) -> Result<String, String> {
    let (mut made, mut rest) = (String::new(), page);
    while let Some(at) = rest.find("<!-- from ") {
        let (before, from) = rest.split_at(at);
        let missing = || format!("no end after {}", from.lines().next().unwrap_or_default());
        let (head, after) = from.split_once(" -->\n").ok_or_else(missing)?;
        let (_, after) = after.split_once("<!-- end -->").ok_or_else(missing)?;
        let source = head.trim_start_matches("<!-- from ");
        let _ = write!(made, "{before}{head} -->\n\n{}\n\n<!-- end -->", part(source)?.trim());
        rest = after;
    }
    made.push_str(rest);
    Ok(made)
}

/// A part by its source: `FILE: NAME`.
fn part(root: &Path, source: &str) -> Result<String, String> {
    let (file, name) = source.split_once(": ").ok_or_else(|| format!("{source}: FILE: NAME is expected"))?;
    let text = read(&root.join(file))?;
    match name {
        "types" => Ok(format!("```c\n{}\n```", declarations(&text)?.0)),
        "functions" => functions(root, declarations(&text)?.1),
        "codes" => Ok(codes(&text)),
        _ => errors(&text, name),
    }
}

/// The types and the functions of the header.
fn declarations(header: &str) -> Result<(&str, &str), String> {
    let (_, after) = header.split_once("#include <stdint.h>\n").ok_or("the header includes no stdint.h")?;
    let (types, after) = after.split_once("#ifdef __cplusplus").ok_or("the header has no types")?;
    let (_, functions) = after.split_once("#endif // __cplusplus\n").ok_or("the header has no functions")?;
    let (functions, _) = functions.split_once("#ifdef __cplusplus").ok_or("the functions have no end")?;
    Ok((types.trim(), functions.trim()))
}

/// Functions, each with what its comment says, under the subject of its file.
fn functions(root: &Path, header: &str) -> Result<String, String> {
    let subjects = subjects(root)?;
    let (mut made, mut last) = (String::new(), "");
    for function in header.split("\n\n") {
        let comment = function.lines().take_while(|line| line.starts_with("//"));
        let lines: Vec<&str> = comment.map(|line| line.trim_start_matches("//").trim_start()).collect();
        let signature = function.lines().skip(lines.len()).collect::<Vec<_>>().join("\n");
        let name = signature.split('(').next().unwrap_or_default().rsplit([' ', '*']).next().unwrap_or_default();
        let subject = subjects.iter().find(|(source, _)| source.contains(&format!("fn {name}(")));
        let (_, subject) = subject.ok_or_else(|| format!("no file of crates/torch/src has a function {name}"))?;
        if subject != last {
            let _ = writeln!(made, "## {}\n", subject.trim_end_matches('.'));
            last = subject;
        }
        let says = lines.join("\n").replace("# Safety\n", "*Safety.* ");
        let says = says.lines().map(wrapped).collect::<Vec<_>>().join("\n");
        let _ = writeln!(made, "### `{name}`\n\n```c\n{signature}\n```\n\n{says}\n");
    }
    Ok(made)
}

/// A line, broken where it is longer than 120 columns.
fn wrapped(line: &str) -> String {
    let is_long = line.chars().count() > 120;
    let space = line.char_indices().take(120).filter(|(_, letter)| *letter == ' ').last();
    match space.filter(|_| is_long) {
        Some((at, _)) => format!("{}\n{}", &line[..at], &line[at + 1..]),
        None => line.to_owned(),
    }
}

/// The files with functions of the interface: the text, and what the file says it is about.
fn subjects(root: &Path) -> Result<Vec<(String, String)>, String> {
    let folder = root.join("crates/torch/src/abi");
    let entries = std::fs::read_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut files: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    files.push(root.join("crates/torch/src/torch_pool.rs"));
    files
        .iter()
        .map(|file| {
            let text = read(file)?;
            let about = text.lines().map_while(|line| line.strip_prefix("//!")).take_while(|line| !line.is_empty());
            let about = about.map(str::trim).collect::<Vec<_>>().join(" ");
            // The first clause.
            let about = about.split([':', '.', ';']).next().unwrap_or_default().to_owned();
            Ok((text, about))
        })
        .collect()
}

/// The table of an enum of errors: each variant with its message and what its comment says.
fn errors(source: &str, name: &str) -> Result<String, String> {
    let file = syn::parse_file(source).map_err(|error| error.to_string())?;
    let found = file.items.iter().find_map(|item| match item {
        Item::Enum(found) if found.ident == name => Some(found),
        _ => None,
    });
    let found: &ItemEnum = found.ok_or_else(|| format!("there is no enum {name}"))?;
    let mut table = "| error | what it is | message |\n|---|---|---|\n".to_owned();
    for variant in &found.variants {
        let what = documentation(&variant.attrs);
        let message = match message(&variant.attrs).as_deref() {
            None => "that of the error in it".to_owned(),
            Some("{0}") => "a report".to_owned(),
            Some(message) => code(message),
        };
        let _ = writeln!(table, "| `{}` | {} | {message} |", variant.ident, cell(&without_links(&what)));
    }
    Ok(table)
}

fn documentation(attributes: &[Attribute]) -> String {
    let lines = attributes.iter().filter_map(|attribute| match &attribute.meta {
        Meta::NameValue(pair) if pair.path.is_ident("doc") => text(&pair.value),
        _ => None,
    });
    lines.map(|line| line.trim().to_owned()).collect::<Vec<_>>().join(" ")
}

/// The text of `#[error("...")]`; `None` for a transparent one.
fn message(attributes: &[Attribute]) -> Option<String> {
    let list = attributes.iter().find_map(|attribute| match &attribute.meta {
        Meta::List(list) if list.path.is_ident("error") => Some(list),
        _ => None,
    })?;
    let parse = |input: syn::parse::ParseStream<'_>| {
        let first = input.parse::<Lit>().ok();
        // Arguments of the format.
        let _ = input.parse::<proc_macro2::TokenStream>();
        Ok(first)
    };
    match list.parse_args_with(parse).ok()?? {
        Lit::Str(text) => Some(text.value()),
        _ => None,
    }
}

fn text(value: &Expr) -> Option<String> {
    match value {
        Expr::Lit(literal) => match &literal.lit {
            Lit::Str(text) => Some(text.value()),
            _ => None,
        },
        _ => None,
    }
}

/// The table of the driver's codes.
fn codes(source: &str) -> String {
    let mut table = "| code | number | CUDA's name | meaning |\n|---|---:|---|---|\n".to_owned();
    let lines = source.lines().map(str::trim).skip_while(|line| *line != "codes! {").skip(1);
    for line in lines.take_while(|line| *line != "}") {
        let Some((name, rest)) = line.split_once(" = ") else { continue };
        let mut words = rest.splitn(3, ' ');
        let (Some(number), Some(cuda), Some(meaning)) = (words.next(), words.next(), words.next()) else { continue };
        let meaning = meaning.trim_end_matches(';').trim_matches('"');
        let _ = writeln!(table, "| `{name}` | {number} | `{cuda}` | {meaning} |");
    }
    table
}

fn code(text: &str) -> String {
    format!("`{}`", cell(text).replace('`', "'").replace(":?}", "}"))
}

/// Text in a table.
fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

/// A comment without rustdoc's links, of which only the text stays.
fn without_links(text: &str) -> String {
    let (mut made, mut rest) = (String::new(), text);
    while let Some((before, after)) = rest.split_once('[') {
        let Some((inner, after)) = after.split_once(']') else { break };
        let target = after.strip_prefix('(').and_then(|after| after.split_once(')'));
        let is_link = target.is_some() || inner.starts_with('`');
        made.push_str(before);
        made.push_str(&if is_link { inner.to_owned() } else { format!("[{inner}]") });
        rest = target.map_or(after, |(_, after)| after);
    }
    made.push_str(rest);
    made
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_made_again() {
        let page = "one\n<!-- from a.rs: B -->\nold\n<!-- end -->\ntwo\n";
        let made = with_parts(page, &|source| Ok(format!("new of {source}"))).unwrap();
        assert_eq!(made, "one\n<!-- from a.rs: B -->\n\nnew of a.rs: B\n\n<!-- end -->\ntwo\n");
        assert_eq!(with_parts(&made, &|source| Ok(format!("new of {source}"))), Ok(made.clone()));
        assert!(with_parts("<!-- from a.rs: B -->\n", &|_| Ok(String::new())).is_err());
    }

    #[test]
    fn errors_are_a_table() {
        let source = "enum E {\n/// A [`b`](crate::B)\n/// in [0, 1].\n#[error(\"at {0:?} | {why}\")]\nFirst,\n/// D.\n\
                      #[error(transparent)]\nSecond(u8) }";
        let table = errors(source, "E").unwrap();
        assert!(table.contains("| `First` | A `b` in [0, 1]. | `at {0} \\| {why}` |\n"), "{table}");
        assert!(table.contains("| `Second` | D. | that of the error in it |\n"), "{table}");
        assert!(errors(source, "F").is_err());
    }
}
