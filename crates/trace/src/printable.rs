//! Text of a recording in messages.

/// At most a line of the text, without line ends and terminal control sequences.
pub(crate) fn shortened(text: &str) -> String {
    const CHARS_MAX: usize = 60;
    let mut shortened = String::new();
    for c in text.chars().take(CHARS_MAX) {
        if c.is_control() { shortened.extend(c.escape_default()) } else { shortened.push(c) }
    }
    if text.chars().nth(CHARS_MAX).is_some() {
        shortened.push('…');
    }
    shortened
}
