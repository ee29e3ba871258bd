//! The grammar of settings strings: entries of a key and a value, which is a word or a list of pairs, each with its
//! position. White space is dropped everywhere, even inside a word. The meaning of keys and values is not checked here.

use crate::error::Problem;

/// A word with its position.
#[derive(Clone, Debug)]
pub(super) struct Word {
    pub text: String,
    pub at: usize,
}

/// The right side of an entry.
#[derive(Clone, Debug)]
pub(super) enum Value {
    Word(Word),
    /// Pairs, and the position of the list.
    List(Vec<(Word, Word)>, usize),
}

/// A problem with a word.
pub(super) fn problem(word: &Word, text: String) -> Problem {
    Problem { key: word.text.clone(), at: Some(word.at), text }
}

/// The entries of a string, and the problems with its delimiters. Reading continues with the entry after a problem.
pub(super) fn entries(string: &str) -> (Vec<(Word, Value)>, Vec<Problem>) {
    let mut cursor = Cursor { tokens: tokens(string), next: 0, end: string.len() };
    let mut entries = Vec::new();
    let mut problems = Vec::new();
    while cursor.next < cursor.tokens.len() {
        match cursor.entry() {
            Ok(entry) => entries.push(entry),
            Err(problem) => {
                problems.push(problem);
                cursor.skip_entry();
            }
        }
    }
    (entries, problems)
}

struct Cursor {
    tokens: Vec<Token>,
    next: usize,
    /// The length of the string: the position that is reported for a missing token.
    end: usize,
}

impl Cursor {
    /// One entry, with the comma after it.
    fn entry(&mut self) -> Result<(Word, Value), Problem> {
        let nameless = Word { text: String::new(), at: self.position() };
        let name = self.word().ok_or_else(|| {
            let text = format!("expected a key, found {}; remove it", self.found());
            problem(&nameless, text)
        })?;
        if !self.take(&TokenKind::Colon) {
            if let Some((key, value)) = name.text.split_once('=') {
                return Err(problem(&name, format!("write `{key}:{value}`, with a colon")));
            }
            return Err(self.expected(&name, "`:` and a value"));
        }
        let value = match self.word() {
            Some(word) => Value::Word(word),
            None if self.found_is(&TokenKind::Open) => self.list(&name)?,
            None => return Err(self.expected(&name, "a value")),
        };
        if self.next < self.tokens.len() && !self.take(&TokenKind::Comma) {
            return Err(self.expected(&name, "`,` or the end"));
        }
        Ok((name, value))
    }

    /// A list of pairs. After a problem the cursor is at its start, so that the whole list is skipped.
    fn list(&mut self, name: &Word) -> Result<Value, Problem> {
        let start = self.next;
        let at = self.position();
        self.next += 1;
        let mut pairs = Vec::new();
        if self.take(&TokenKind::Close) {
            return Ok(Value::List(pairs, at));
        }
        let problem = loop {
            let Some(left) = self.word() else { break self.expected(name, "an entry `NAME:VALUE` of the list") };
            if !self.take(&TokenKind::Colon) {
                break self.expected(name, "`:` and a value in the list");
            }
            let Some(right) = self.word() else { break self.expected(name, "a value in the list") };
            pairs.push((left, right));
            if self.take(&TokenKind::Close) {
                return Ok(Value::List(pairs, at));
            }
            if !self.take(&TokenKind::Comma) {
                break self.expected(name, "`,` or `]`");
            }
        };
        self.next = start;
        Err(problem)
    }

    /// Moves past the next comma outside of a list.
    fn skip_entry(&mut self) {
        let mut depth = 0_usize;
        while let Some(token) = self.tokens.get(self.next) {
            self.next += 1;
            match token.kind {
                TokenKind::Open => depth += 1,
                TokenKind::Close => depth = depth.saturating_sub(1),
                TokenKind::Comma if depth == 0 => return,
                _ => {}
            }
        }
    }

    fn word(&mut self) -> Option<Word> {
        let Some(Token { kind: TokenKind::Word(text), at }) = self.tokens.get(self.next) else { return None };
        self.next += 1;
        Some(Word { text: text.clone(), at: *at })
    }

    fn take(&mut self, kind: &TokenKind) -> bool {
        let found = self.found_is(kind);
        self.next += usize::from(found);
        found
    }

    fn found_is(&self, kind: &TokenKind) -> bool {
        self.tokens.get(self.next).is_some_and(|token| token.kind == *kind)
    }

    fn found(&self) -> String {
        self.tokens.get(self.next).map_or("the end of the string".into(), |token| token.kind.quoted())
    }

    fn position(&self) -> usize {
        self.tokens.get(self.next).map_or(self.end, |token| token.at)
    }

    fn expected(&self, name: &Word, what: &str) -> Problem {
        let text = format!("expected {what}, found {}", self.found());
        Problem { key: name.text.clone(), at: Some(self.position()), text }
    }
}

/// A token with its position.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Token {
    kind: TokenKind,
    /// The byte offset of its first character.
    at: usize,
}

/// A word or a delimiter.
#[derive(Clone, Debug, PartialEq, Eq)]
enum TokenKind {
    Word(String),
    Comma,
    Colon,
    Open,
    Close,
}

impl TokenKind {
    /// Its form in messages.
    fn quoted(&self) -> String {
        match self {
            Self::Word(word) => format!("`{word}`"),
            Self::Comma => "`,`".into(),
            Self::Colon => "`:`".into(),
            Self::Open => "`[`".into(),
            Self::Close => "`]`".into(),
        }
    }
}

/// Splits a string into tokens.
fn tokens(string: &str) -> Vec<Token> {
    let mut tokens: Vec<Token> = Vec::new();
    for (at, character) in string.char_indices().filter(|(_, character)| !character.is_whitespace()) {
        let delimiter = match character {
            ',' => Some(TokenKind::Comma),
            ':' => Some(TokenKind::Colon),
            '[' => Some(TokenKind::Open),
            ']' => Some(TokenKind::Close),
            _ => None,
        };
        match (delimiter, tokens.last_mut()) {
            (Some(kind), _) => tokens.push(Token { kind, at }),
            (None, Some(Token { kind: TokenKind::Word(word), .. })) => word.push(character),
            (None, _) => tokens.push(Token { kind: TokenKind::Word(character.into()), at }),
        }
    }
    tokens
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(string: &str, expected: &str) {
        let found: Vec<String> =
            tokens(string).iter().map(|token| format!("{}@{}", token.kind.quoted(), token.at)).collect();
        assert_eq!(found.join(" "), expected, "tokens of {string:?}");
    }

    #[test]
    fn a_string_is_words_and_delimiters() {
        check("", "");
        check(" \t\n", "");
        check("a:True", "`a`@0 `:`@1 `True`@2");
        check(" a b : c,", "`ab`@1 `:`@5 `c`@7 `,`@8");
        check("k:[1:2,>:3]", "`k`@0 `:`@1 `[`@2 `1`@3 `:`@4 `2`@5 `,`@6 `>`@7 `:`@8 `3`@9 `]`@10");
        check("é:ü", "`é`@0 `:`@2 `ü`@3");
        check("::", "`:`@0 `:`@1");
    }
}
