//! A settings string as tokens: words and the four delimiters, each with its place in the string.
//! White space is dropped wherever it stands, even inside a word. What follows what is not judged here.

/// A piece of the string.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Token {
    pub what: What,
    /// Where its first character stands, in bytes.
    pub at: usize,
}

/// What a token is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum What {
    Word(String),
    Comma,
    Colon,
    Open,
    Close,
}

impl What {
    /// How messages show it.
    pub(super) fn quoted(&self) -> String {
        match self {
            Self::Word(word) => format!("`{word}`"),
            Self::Comma => "`,`".into(),
            Self::Colon => "`:`".into(),
            Self::Open => "`[`".into(),
            Self::Close => "`]`".into(),
        }
    }
}

/// Cuts a string into tokens.
pub(super) fn tokens(string: &str) -> Vec<Token> {
    let mut tokens: Vec<Token> = Vec::new();
    for (at, character) in string.char_indices().filter(|(_, character)| !character.is_whitespace()) {
        let delimiter = match character {
            ',' => Some(What::Comma),
            ':' => Some(What::Colon),
            '[' => Some(What::Open),
            ']' => Some(What::Close),
            _ => None,
        };
        match (delimiter, tokens.last_mut()) {
            (Some(what), _) => tokens.push(Token { what, at }),
            (None, Some(Token { what: What::Word(word), .. })) => word.push(character),
            (None, _) => tokens.push(Token { what: What::Word(character.into()), at }),
        }
    }
    tokens
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(string: &str, expected: &str) {
        let shown: Vec<String> =
            tokens(string).iter().map(|token| format!("{}@{}", token.what.quoted(), token.at)).collect();
        assert_eq!(shown.join(" "), expected, "tokens of {string:?}");
    }

    #[test]
    fn strings_fall_into_words_and_delimiters() {
        check("", "");
        check(" \t\n", "");
        check("a:True", "`a`@0 `:`@1 `True`@2");
        check(" a b : c,", "`ab`@1 `:`@5 `c`@7 `,`@8");
        check("k:[1:2,>:3]", "`k`@0 `:`@1 `[`@2 `1`@3 `:`@4 `2`@5 `,`@6 `>`@7 `:`@8 `3`@9 `]`@10");
        check("é:ü", "`é`@0 `:`@2 `ü`@3");
        check("::", "`:`@0 `:`@1");
    }
}
