//! From a settings string to settings: entries are read from tokens, then applied to a copy of what was before.
//! Reading goes on behind a mistake, so that all of them are found. What single values may be is in `value.rs`.

use std::collections::BTreeMap;

use super::error::{Problem, Warning};
use super::keys::{Key, suggestion};
use super::token::{Token, What, tokens};
use super::{Backend, MIB, Settings, value};

/// What a string is read for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// To start with.
    First,
    /// To change settings that are in force.
    Update,
    /// To learn what a recorded program had: PyTorch took the string, so what it cannot mean here is passed over.
    Recorded,
}

/// What a string came to.
#[derive(Debug)]
pub(super) struct Reading {
    /// The settings with all that could be applied; of use only if there are no problems.
    pub settings: Settings,
    /// The keys that were given, and where.
    pub given: BTreeMap<Key, usize>,
    /// What is wrong, in the order of the string.
    pub problems: Vec<Problem>,
    /// What is odd in the writing. What is odd in the result, the linter says.
    pub warnings: Vec<Warning>,
}

/// A word, and where it stands.
#[derive(Clone, Debug)]
pub(super) struct Word {
    pub text: String,
    pub at: usize,
}

/// The right side of an entry.
#[derive(Clone, Debug)]
pub(super) enum Value {
    Word(Word),
    /// Pairs, and where the list starts.
    List(Vec<(Word, Word)>, usize),
}

/// Reads a string over `base`.
pub(super) fn read(base: &Settings, string: &str, mode: Mode) -> Reading {
    let (entries, problems) = entries(string);
    let mut reading = Reading {
        settings: Settings { source: string.into(), ..base.clone() },
        given: BTreeMap::new(),
        problems,
        warnings: Vec::new(),
    };
    let known = reading.known(entries);
    // The size of large segments comes first: others are measured by it, and one goes back to it.
    let (large, others): (Vec<_>, Vec<_>) = known.into_iter().partition(|(key, ..)| *key == Key::LargeSegmentSize);
    reading.apply(large);
    reset(&mut reading.settings);
    reading.apply(others);
    if mode != Mode::Recorded {
        reading.check_pairs(base, mode);
    }
    reading.problems.sort_by_key(|problem| problem.at);
    reading
}

/// Puts back what every further string puts back.
fn reset(settings: &mut Settings) {
    let default = settings.defaults();
    settings.max_split_bytes = default.max_split_bytes;
    settings.max_non_split_rounding_bytes = default.max_non_split_rounding_bytes;
    settings.garbage_collection_threshold = default.garbage_collection_threshold;
    settings.roundup_power2_divisions = default.roundup_power2_divisions;
}

impl Reading {
    /// The entries whose keys there are.
    fn known(&mut self, entries: Vec<(Word, Value)>) -> Vec<(Key, Word, Value)> {
        let mut known = Vec::new();
        for (name, value) in entries {
            match Key::named(&name.text) {
                Some(key) => known.push((key, name, value)),
                None => self.problems.push(problem(&name, unknown(&name.text))),
            }
        }
        known
    }

    fn apply(&mut self, entries: Vec<(Key, Word, Value)>) {
        for (key, name, value) in entries {
            if let Some(before) = self.given.insert(key, name.at) {
                let text =
                    format!("given a second time, first at byte {before}; the last one counts, remove the others");
                self.warn(key, Some(name.at), text);
            }
            match value::set(&mut self.settings, key, &value) {
                Ok(notes) => notes.into_iter().for_each(|note| self.warn(key, Some(note.at), note.text)),
                Err(note) => self.problems.push(Problem { key: name.text, at: Some(note.at), text: note.text }),
            }
        }
    }

    fn warn(&mut self, key: Key, at: Option<usize>, text: String) {
        self.warnings.push(Warning { key: key.name().into(), at, text });
    }

    /// Settings that cannot go together, wherever each of them comes from.
    fn check_pairs(&mut self, base: &Settings, mode: Mode) {
        let settings = &self.settings;
        let mut refused = Vec::new();
        if mode == Mode::Update && settings.backend != base.backend {
            refused.push((
                [Key::Backend, Key::Backend],
                format!(
                    "the backend is chosen once, and it is {}; leave the key out, or start again with it",
                    base.backend.name()
                ),
            ));
        } else if settings.backend == Backend::CudaMallocAsync && settings.expandable_segments {
            refused.push((
                [Key::Backend, Key::ExpandableSegments],
                "the driver's pool has no expandable segments; leave out either `backend:cudaMallocAsync` or \
                 `expandable_segments:True`"
                    .into(),
            ));
        }
        if settings.expandable_segments && !settings.large_segment_bytes.is_multiple_of(2 * MIB) {
            refused.push((
                [Key::LargeSegmentSize, Key::ExpandableSegments],
                "expandable segments are mapped in steps of 2 MiB; give an even number".into(),
            ));
        }
        for (keys, text) in refused {
            // Named is the one that the string gives; neither, if they clashed before already.
            let given = keys.into_iter().find_map(|key| Some((key, *self.given.get(&key)?)));
            let (key, at) = given.map_or((keys[0], None), |(key, at)| (key, Some(at)));
            self.problems.push(Problem { key: key.name().into(), at, text });
        }
    }
}

/// Says that a key is none, and which may be meant.
fn unknown(name: &str) -> String {
    if name == "expandable_segments_handle_type" {
        return "not a setting, although PyTorch's messages name it: PyTorch does not read it either; leave it out"
            .into();
    }
    if name.contains(['=', ';']) {
        return "not a setting; write `key:value`, with commas between entries".into();
    }
    if name.contains(['"', '\'']) {
        return "not a setting; leave the quotation marks out of the string".into();
    }
    match suggestion(name) {
        Some(key) => format!("not a setting; did you mean `{key}`?"),
        None => "not a setting of PyTorch's or Warpool's; leave it out".into(),
    }
}

fn problem(word: &Word, text: String) -> Problem {
    Problem { key: word.text.clone(), at: Some(word.at), text }
}

/// The entries of a string, and what is wrong with its delimiters.
fn entries(string: &str) -> (Vec<(Word, Value)>, Vec<Problem>) {
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
    /// Where the string ends: the place of what is missing.
    end: usize,
}

impl Cursor {
    /// One entry, with the comma behind it.
    fn entry(&mut self) -> Result<(Word, Value), Problem> {
        let nameless = Word { text: String::new(), at: self.place() };
        let name = self.word().ok_or_else(|| {
            let text = format!("expected a key, but there is {}; remove it", self.found());
            problem(&nameless, text)
        })?;
        if !self.take(&What::Colon) {
            if let Some((key, value)) = name.text.split_once('=') {
                return Err(problem(&name, format!("write `{key}:{value}`, with a colon")));
            }
            return Err(self.expected(&name, "`:` and a value"));
        }
        let value = match self.word() {
            Some(word) => Value::Word(word),
            None if self.found_is(&What::Open) => self.list(&name)?,
            None => return Err(self.expected(&name, "a value")),
        };
        if self.next < self.tokens.len() && !self.take(&What::Comma) {
            return Err(self.expected(&name, "`,` or the end"));
        }
        Ok((name, value))
    }

    /// A list of pairs. On a mistake the cursor is put at its start, so that it is skipped whole.
    fn list(&mut self, name: &Word) -> Result<Value, Problem> {
        let start = self.next;
        let at = self.place();
        self.next += 1;
        let mut pairs = Vec::new();
        if self.take(&What::Close) {
            return Ok(Value::List(pairs, at));
        }
        let problem = loop {
            let Some(left) = self.word() else { break self.expected(name, "an entry `NAME:VALUE` of the list") };
            if !self.take(&What::Colon) {
                break self.expected(name, "`:` and a value in the list");
            }
            let Some(right) = self.word() else { break self.expected(name, "a value in the list") };
            pairs.push((left, right));
            if self.take(&What::Close) {
                return Ok(Value::List(pairs, at));
            }
            if !self.take(&What::Comma) {
                break self.expected(name, "`,` or `]`");
            }
        };
        self.next = start;
        Err(problem)
    }

    /// Moves behind the next comma that is in no list.
    fn skip_entry(&mut self) {
        let mut depth = 0_usize;
        while let Some(token) = self.tokens.get(self.next) {
            self.next += 1;
            match token.what {
                What::Open => depth += 1,
                What::Close => depth = depth.saturating_sub(1),
                What::Comma if depth == 0 => return,
                _ => {}
            }
        }
    }

    fn word(&mut self) -> Option<Word> {
        let Some(Token { what: What::Word(text), at }) = self.tokens.get(self.next) else { return None };
        self.next += 1;
        Some(Word { text: text.clone(), at: *at })
    }

    fn take(&mut self, what: &What) -> bool {
        let found = self.found_is(what);
        self.next += usize::from(found);
        found
    }

    fn found_is(&self, what: &What) -> bool {
        self.tokens.get(self.next).is_some_and(|token| token.what == *what)
    }

    fn found(&self) -> String {
        self.tokens.get(self.next).map_or("the end of the string".into(), |token| token.what.quoted())
    }

    fn place(&self) -> usize {
        self.tokens.get(self.next).map_or(self.end, |token| token.at)
    }

    fn expected(&self, name: &Word, what: &str) -> Problem {
        let text = format!("expected {what}, but there is {}", self.found());
        Problem { key: name.text.clone(), at: Some(self.place()), text }
    }
}
