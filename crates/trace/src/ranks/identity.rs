//! Which rank of which job a recording is of: from the metadata that the program set, or from the file's name.
//!
//! `rank` and a number (`rank0`, `rank_3`, `rank=12`), `world` or `world_size` likewise, `host` or `node` and a name
//! (`host=gpu7`, `node12`), and `r3` between separators. A bare number at the end of a name (`oom_3.pickle`) may be
//! anything; the report takes it as a rank if all recordings have one and these differ.

use warpool::memory::report::Snapshot;

/// What is known of a recording's place in a job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// The rank.
    pub rank: Option<u32>,
    /// How many ranks the job has.
    pub world: Option<u32>,
    /// The machine.
    pub host: Option<String>,
}

impl Identity {
    /// What is known here, and else what `other` says.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self { rank: self.rank.or(other.rank), world: self.world.or(other.world), host: self.host.or(other.host) }
    }

    /// What the program set as metadata of its allocations: `torch.cuda.memory._set_memory_metadata("rank=3 world=8")`.
    #[must_use]
    pub fn of_metadata(snapshot: &Snapshot) -> Self {
        let ids = snapshot.traces.iter().flatten().filter_map(|entry| entry.user_metadata);
        let mut last = None;
        for id in ids {
            // Most entries have the text of the one before.
            if last == Some(id) {
                continue;
            }
            last = Some(id);
            let found = Self::of_text(snapshot.texts.get(id));
            if found.rank.is_some() {
                return found;
            }
        }
        Self::default()
    }

    /// What a path says: the file's name first, then the folders from the innermost.
    #[must_use]
    pub fn of_path(path: &str) -> Self {
        let parts = path.rsplit(['/', '\\']).map(Self::of_text);
        parts.fold(Self::default(), Self::or)
    }

    fn of_text(text: &str) -> Self {
        let mut found = Self::default();
        let tokens: Vec<&str> =
            text.split(|letter: char| !letter.is_alphanumeric()).filter(|it| !it.is_empty()).collect();
        for (at, &token) in tokens.iter().enumerate() {
            let next = tokens.get(at + 1).copied().unwrap_or("");
            let word = token.trim_end_matches(|letter: char| letter.is_ascii_digit());
            let digits = &token[word.len()..];
            // The number is in the token, or is the next one.
            let value = if digits.is_empty() { next } else { digits };
            let number = value.parse::<u32>().ok();
            match word.to_ascii_lowercase().as_str() {
                "rank" => found.rank = found.rank.or(number),
                "r" if !digits.is_empty() => found.rank = found.rank.or(number),
                "world" | "worldsize" => {
                    // `world_size=8` is three tokens.
                    let of_size = || tokens.get(at + 2).filter(|_| next.eq_ignore_ascii_case("size"))?.parse().ok();
                    found.world = found.world.or(number).or_else(of_size);
                }
                "host" | "node" if digits.is_empty() && !next.is_empty() => {
                    let name = host_after(text, token);
                    found.host = found.host.or(name);
                }
                "host" | "node" if !digits.is_empty() => {
                    found.host = found.host.or_else(|| Some(token.to_owned()));
                }
                _ => {}
            }
        }
        found
    }
}

/// The name after `host=` or `host_`: up to the next separator; a dot or a hyphen belongs to it after `=`.
fn host_after(text: &str, word: &str) -> Option<String> {
    let rest = &text[text.find(word)? + word.len()..];
    let separator = rest.chars().next()?;
    let rest = &rest[separator.len_utf8()..];
    let is_within = |letter: char| letter.is_alphanumeric() || (separator == '=' && (letter == '.' || letter == '-'));
    let name = &rest[..rest.find(|letter| !is_within(letter)).unwrap_or(rest.len())];
    (!name.is_empty()).then(|| name.to_owned())
}

/// The bare number at the end of a file's name without its endings, with what comes before it: `oom_` and 3 of
/// `a/oom_3.pickle.xz`.
pub(super) fn bare_number(path: &str) -> Option<(&str, u32)> {
    let name = path.rsplit(['/', '\\']).next()?;
    // Endings have no digit at their end but for `.bz2`.
    let mut stem = name;
    while let Some((before, ending)) = stem.rsplit_once('.') {
        let is_ending = ending == "bz2" || ending == "tbz2" || ending.chars().all(|it| it.is_ascii_alphabetic());
        if !is_ending || before.is_empty() {
            break;
        }
        stem = before;
    }
    let word = stem.trim_end_matches(|letter: char| letter.is_ascii_digit());
    let is_separated = word.is_empty() || word.ends_with(['_', '-', '.']);
    Some((word, stem[word.len()..].parse().ok().filter(|_| is_separated)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_rank_world_and_host() {
        let check = |path: &str, rank: Option<u32>, world: Option<u32>, host: Option<&str>| {
            let expected = Identity { rank, world, host: host.map(str::to_owned) };
            assert_eq!(Identity::of_path(path), expected, "{path}");
        };
        check("rank0.pickle", Some(0), None, None);
        check("job/oom_rank_12.pickle.xz", Some(12), None, None);
        check("snapshot-r3.pkl", Some(3), None, None);
        check("rank=7,world=64.pickle", Some(7), Some(64), None);
        check("Rank3_world_size_8.pickle", Some(3), Some(8), None);
        check("host=gpu-7.cluster/rank5/memory.pickle", Some(5), None, Some("gpu-7.cluster"));
        check("node12_rank4_snapshot.pickle", Some(4), None, Some("node12"));
        check("iteration_10/rank0_memory_snapshot.pickle", Some(0), None, None);
        check("ranks/rank1.pickle", Some(1), None, None);
        // Not a rank.
        check("frank3.pickle", None, None, None);
        check("ring.late_max_split_64.pickle.xz", None, None, None);
        check("train.default.pickle", None, None, None);
        check("rank99999999999.pickle", None, None, None);
    }

    #[test]
    fn bare_numbers_are_at_the_end_of_the_name() {
        assert_eq!(bare_number("a/oom_3.pickle.xz"), Some(("oom_", 3)));
        assert_eq!(bare_number("12.pickle.bz2"), Some(("", 12)));
        assert_eq!(bare_number("mem-0007.pkl"), Some(("mem-", 7)));
        assert_eq!(bare_number("v2.pickle"), None, "it belongs to a word");
        assert_eq!(bare_number("oom.pickle"), None);
    }
}
