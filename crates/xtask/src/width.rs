//! Lines of code and prose stay within 120 columns. Tables and code blocks of Markdown are exempt: a table row cannot
//! be broken.

use std::path::Path;

use crate::tracked;

const COLUMNS: usize = 120;

const PATTERNS: [&str; 11] =
    ["*.rs", "*.md", "*.py", "*.sh", "*.toml", "*.c", "*.h", "*.cpp", "*.js", "*.css", "*.html"];

/// Every line that is too long in the files that git tracks.
pub fn check(root: &Path) -> Result<Vec<String>, String> {
    let mut problems = Vec::new();
    for (name, text) in tracked::texts(root, &PATTERNS)? {
        problems.extend(
            too_long(&text, name.ends_with(".md")).map(|(line, columns)| format!("{name}:{line}: {columns} columns")),
        );
    }
    Ok(problems)
}

fn too_long(text: &str, markdown: bool) -> impl Iterator<Item = (usize, usize)> + '_ {
    let mut in_code = false;
    text.lines().enumerate().filter_map(move |(at, line)| {
        in_code ^= markdown && line.trim_start().starts_with("```");
        let exempt = markdown && (in_code || line.trim_start().starts_with('|'));
        let columns = line.chars().count();
        (columns > COLUMNS && !exempt).then_some((at + 1, columns))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prose_counts_and_tables_and_code_blocks_do_not() {
        let long = "x".repeat(121);
        let text = format!("{long}\n|{long}\n```\n{long}\n```\n{long}\n");
        assert_eq!(too_long(&text, true).collect::<Vec<_>>(), [(1, 121), (6, 121)]);
        assert_eq!(too_long(&text, false).count(), 4);
    }
}
