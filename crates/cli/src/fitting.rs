//! Text and tables in lines that are not wider than a terminal.

use comfy_table::{ColumnConstraint, ContentArrangement, Row, Table, Width};

/// Binds a number to its unit, so that they stay on one line.
const NO_BREAK: char = '\u{a0}';

/// The lines of a table. Cells are wrapped between words, and longer words, such as file names, also within. If the
/// width is still not enough, the cells of a row are written below one another.
pub fn fitted(table: &Table, width: usize) -> Vec<String> {
    let mut table = table.clone();
    let header: Vec<String> = table.header().map(cells).unwrap_or_default();
    table.row_iter_mut().for_each(|row| *row = Row::from(cells(row)));
    let rows: Vec<Vec<String>> = table.row_iter().map(cells).collect();
    let least: Vec<usize> = (0..header.len())
        .map(|column| {
            rows.iter().chain([&header]).filter_map(|row| row.get(column)).map(|cell| least_width(cell)).max()
        })
        .map(Option::unwrap_or_default)
        .collect();
    // A column has a space on both sides, and there is one more between columns and at the start.
    let needed = least.iter().map(|least| least + 3).sum::<usize>() + 1;
    let lines = match u16::try_from(width) {
        Ok(columns) if needed <= width => {
            let boundary = |&least: &usize| ColumnConstraint::LowerBoundary(Width::Fixed(least as u16));
            let constraints: Vec<ColumnConstraint> = least.iter().map(boundary).collect();
            table.set_content_arrangement(ContentArrangement::Dynamic).set_width(columns).set_constraints(constraints);
            table.lines().collect()
        }
        _ => listed(&header, &rows, width),
    };
    lines.into_iter().map(|line: String| line.replace(NO_BREAK, " ")).collect()
}

/// The cells of a row, with numbers bound to their units.
fn cells(row: &Row) -> Vec<String> {
    row.cell_iter().map(|cell| bound(&cell.content())).collect()
}

/// The text with its numbers bound to their units.
fn bound(text: &str) -> String {
    const UNITS: [&str; 10] = ["TiB", "GiB", "MiB", "KiB", "B", "s", "ms", "us", "ns", "%"];
    let mut bound = String::new();
    for (index, word) in text.split(' ').enumerate() {
        let is_unit = UNITS.contains(&word.trim_end_matches([',', ';', ')']));
        if index > 0 {
            bound.push(if is_unit && bound.ends_with(|c: char| c.is_ascii_digit()) { NO_BREAK } else { ' ' });
        }
        bound.push_str(word);
    }
    bound
}

/// The width that a cell needs: that of its longest word, or of a part of it if it is very long.
fn least_width(cell: &str) -> usize {
    /// Long names may be broken from here on; a size with its unit is shorter.
    const BREAKABLE: usize = 16;
    cell.split(' ').map(|word| word.chars().count()).max().unwrap_or(0).min(BREAKABLE)
}

/// Each row as a list of its cells.
fn listed(header: &[String], rows: &[Vec<String>], width: usize) -> Vec<String> {
    let label = header.iter().map(|name| name.chars().count()).max().unwrap_or(0);
    let mut lines = Vec::new();
    for row in rows {
        if !lines.is_empty() {
            lines.push(String::new());
        }
        for (name, cell) in header.iter().zip(row) {
            let padding = " ".repeat(label - name.chars().count());
            lines.extend(indented(&format!("  {name}{padding}  {cell}"), label + 4, width));
        }
    }
    lines
}

/// A line in lines of at most `width` letters, the further ones indented. Spaces at its start and between its words
/// stay; a word that is longer than a line is broken.
pub fn indented(line: &str, indent: usize, width: usize) -> Vec<String> {
    let indent = if indent < width / 2 { indent } else { 0 };
    let mut lines = vec![String::new()];
    let mut length = 0;
    for word in bound(line).split_inclusive(' ') {
        let visible = word.trim_end_matches(' ').chars().count();
        if length + visible > width && length > indent {
            lines.push(" ".repeat(indent));
            length = indent;
        }
        for letter in word.chars() {
            if length == width && letter != ' ' {
                lines.push(" ".repeat(indent));
                length = indent;
            }
            if length < width {
                lines.last_mut().expect("it begins with one").push(letter);
                length += 1;
            }
        }
    }
    lines.iter().map(|line| line.trim_end_matches(' ').replace(NO_BREAK, " ")).collect()
}

/// The words of a text in lines of at most `width` letters; a longer word has a line of its own.
pub fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().expect("it begins with one");
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > width {
            lines.push(word.to_owned());
            continue;
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output;

    #[test]
    fn paragraphs_are_wrapped_between_words() {
        assert_eq!(wrapped("one two three", 7), ["one two", "three"]);
        assert_eq!(wrapped("extraordinary word", 5), ["extraordinary", "word"]);
    }

    #[test]
    fn lines_are_indented_and_long_words_broken() {
        assert_eq!(indented("a.pickle: reserves 1.5 GiB", 2, 21), ["a.pickle: reserves", "  1.5 GiB"]);
        assert_eq!(indented("live   peak of bytes", 7, 16), ["live   peak of", "       bytes"]);
        assert_eq!(indented("/a/very/long/path", 2, 8), ["/a/very/", "  long/p", "  ath"]);
        assert_eq!(indented("short", 2, 80), ["short"]);
    }

    /// Every width shows every word, and no line is wider.
    #[test]
    fn tables_fit_any_width() {
        let mut table = output::table(&["file", ">reserved", ">driver time", "outcome"]);
        table.add_row(["a/rather/long/name/of/a/recording.pickle.xz", "139.8 GiB (99.2%)", "0.123 s", "completed"]);
        table.add_row(["b.pickle", "12 MiB", "12.000 s", "fits in 16 of 16 orders"]);
        for width in 20..140 {
            let lines = fitted(&table, width);
            let text = lines.join("\n");
            assert!(lines.iter().all(|line| line.trim_end().chars().count() <= width), "{width}:\n{text}");
            for word in ["139.8 GiB", "(99.2%)", "12 MiB", "0.123 s", "12.000 s", "completed"] {
                assert!(text.contains(word), "{word:?} at {width}:\n{text}");
            }
        }
        assert!(fitted(&table, 40)[0].starts_with("  file"), "the cells are below one another");
        assert_eq!(fitted(&table, 140).len(), table.lines().count());
    }
}
