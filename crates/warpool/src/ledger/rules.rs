//! The rules by which processes divide a card, as functions of what their entries say. No words, no driver, no clock
//! here: `admission.rs` reads the entries and asks these.
//!
//! - What all may have together is what the driver has free, and what they hold. A part of what is free stays for
//!   memory that no allocator has, unless a process has not got what it is guaranteed.
//! - Of that, each process owns the larger of its grant and its guarantee. A grant grows only into what nobody owns: so
//!   a process always gets up to its guarantee, as long as nobody else takes memory of the card.
//! - A process that joins may be guaranteed more than the others leave. Of its guarantee it *keeps* what was there for
//!   it once. What it still waits for keeps no other process from what that one is guaranteed.
//! - If there is no room, those give that have free pages beyond their guarantee: lower priorities first, among equal
//!   ones those with most. Nobody gives to a lower priority, and who needs memory itself gives to higher ones alone;
//!   but everybody gives to a process that has not got what it is guaranteed.

use crate::defect::Defect;

/// What a process says of its part of a card, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Identifies the process's page.
    pub(crate) number: u64,
    pub(crate) guaranteed: u64,
    /// How much of that was there for it once, and stays its own.
    pub(crate) kept: u64,
    /// Higher ones get free pages of lower ones.
    pub(crate) priority: u64,
    /// What it may hold: never less than it does.
    pub(crate) granted: u64,
    /// By how much it is trying to raise that.
    pub(crate) claim: u64,
    /// What it has from the driver.
    pub(crate) held: u64,
    /// Free pages of that.
    pub(crate) idle: u64,
    /// What it asks of others, and for how long already, in times that they have to answer.
    pub(crate) wanted: u64,
    pub(crate) rounds: u64,
}

/// The answer to a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Granted,
    /// There would be room without claims of others, which are decided in a moment.
    Contended,
    /// So much is missing.
    Refused(u64),
}

impl Entry {
    /// What belongs to it, whether it holds it or not.
    fn owned(&self, claim: u64) -> u64 {
        let granted = self.granted.saturating_add(claim);
        if Defect::GuaranteesIgnored.is_on() { granted } else { granted.max(self.guaranteed) }
    }

    /// The same without what it is guaranteed and could not be given yet.
    fn owned_so_far(&self, claim: u64) -> u64 {
        self.granted.saturating_add(claim).max(self.kept)
    }

    /// What it can give without going below its guarantee: free pages, and what it was granted and does not hold.
    pub(crate) fn spare(&self) -> u64 {
        let unused = self.idle.saturating_add(self.granted.saturating_sub(self.held));
        unused.min(self.granted.saturating_sub(self.guaranteed))
    }
}

/// What processes may have together: what the driver has free, and what each of them holds.
pub(crate) fn capacity(free: u64, entries: &[Entry]) -> u64 {
    entries.iter().fold(free, |sum, entry| sum.saturating_add(entry.held))
}

/// Decides about the claim of `own`.
pub(crate) fn decide(own: &Entry, others: &[Entry], capacity: u64) -> Verdict {
    let total = own.granted.saturating_add(own.claim);
    let owned_by = if total <= own.guaranteed { Entry::owned_so_far } else { Entry::owned };
    let owned = |claim: fn(&Entry) -> u64| {
        others.iter().fold(total, |sum, other| sum.saturating_add(owned_by(other, claim(other))))
    };
    let claim: fn(&Entry) -> u64 = if Defect::ClaimsIgnored.is_on() { |_| 0 } else { |other| other.claim };
    if owned(claim) <= capacity {
        return Verdict::Granted;
    }
    match owned(|_| 0).saturating_sub(capacity) {
        0 => Verdict::Contended,
        missing => Verdict::Refused(missing),
    }
}

/// What nobody owns, and `own` could take.
pub(crate) fn room(own: &Entry, others: &[Entry], capacity: u64) -> u64 {
    let owned = others.iter().fold(0, |sum: u64, other| sum.saturating_add(other.owned(other.claim)));
    capacity.saturating_sub(owned).saturating_sub(own.held)
}

/// How much of its guarantee a process can keep from now on.
pub(crate) fn can_keep(own: &Entry, others: &[Entry], capacity: u64) -> u64 {
    let theirs = others.iter().fold(0, |sum: u64, other| sum.saturating_add(other.owned_so_far(other.claim)));
    capacity.saturating_sub(theirs).min(own.guaranteed)
}

/// Whether anybody has something to give to `own`.
pub(crate) fn others_can_give(own: &Entry, others: &[Entry]) -> bool {
    others.iter().any(|other| gives_to(other, own) && other.spare() > 0)
}

/// How much `own` gives now. Those that give first are expected to do so within a round; a process that was stopped
/// does not, so from the second one on everybody gives all that is wanted.
pub(crate) fn to_give(own: &Entry, others: &[Entry]) -> u64 {
    let askers = || others.iter().filter(|other| other.wanted > 0 && gives_to(own, other));
    let wanted = askers().fold(0, |sum: u64, asker| sum.saturating_add(asker.wanted));
    let is_late = askers().any(|asker| asker.rounds > 0);
    let rank = |entry: &Entry| (entry.priority, std::cmp::Reverse(entry.spare()), entry.number);
    let before = others.iter().filter(|other| askers().all(|asker| gives_to(other, asker)) && rank(other) < rank(own));
    let given = if is_late { 0 } else { before.fold(0, |sum: u64, other| sum.saturating_add(other.spare())) };
    own.spare().min(wanted.saturating_sub(given))
}

/// Whether a process gives free pages to another.
fn gives_to(from: &Entry, to: &Entry) -> bool {
    let is_lower = if from.wanted > 0 { from.priority < to.priority } else { from.priority <= to.priority };
    from.number != to.number && (is_lower || to.granted < to.guaranteed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(number: u64, guaranteed: u64, granted: u64) -> Entry {
        Entry { number, guaranteed, kept: guaranteed, granted, held: granted, ..Entry::default() }
    }

    /// All divisions of a card of six units between three processes: a claim is granted if and only if it takes nothing
    /// that another owns, and a process within its guarantee is never refused.
    #[test]
    fn what_others_own_is_never_granted() {
        let units = 0..=6_u64;
        let pairs: Vec<(u64, u64)> = units.clone().flat_map(|a| units.clone().map(move |b| (a, b))).collect();
        let mut decided = 0;
        for &(first, second) in &pairs {
            for &(granted_first, granted_second) in &pairs {
                for &(guaranteed, granted) in &pairs {
                    let others = [entry(1, first, granted_first), entry(2, second, granted_second)];
                    let owned: u64 = others.iter().map(|other| other.granted.max(other.guaranteed)).sum();
                    if owned + granted.max(guaranteed) > 6 {
                        // No such state is reached.
                        continue;
                    }
                    for claim in units.clone() {
                        let own = Entry { claim, ..entry(0, guaranteed, granted) };
                        let verdict = decide(&own, &others, 6);
                        let fits = owned + granted + claim <= 6;
                        assert_eq!(verdict == Verdict::Granted, fits, "{own:?} {others:?}");
                        assert!(
                            granted + claim > guaranteed || fits,
                            "guaranteed memory was refused: {own:?} {others:?}"
                        );
                        decided += 1;
                    }
                }
            }
        }
        assert!(decided > 4000, "{decided}");
    }

    /// Two units are left. One process had three and is guaranteed four, and gave one back; the other one is guaranteed
    /// three, and joined when others had nearly everything.
    #[test]
    fn what_a_process_waits_for_keeps_no_other_from_its_guarantee() {
        let (rest, waiting) = (entry(1, 0, 4), Entry { kept: 0, ..entry(2, 3, 0) });
        let own = |granted, claim| Entry { claim, ..entry(3, 4, granted) };
        assert_eq!(decide(&own(2, 2), &[rest, waiting], 8), Verdict::Granted);
        // What is guaranteed to nobody is for those that wait.
        assert_eq!(decide(&own(4, 1), &[rest, waiting], 8), Verdict::Refused(4));
        assert_eq!(decide(&Entry { claim: 1, ..rest }, &[own(2, 0), waiting], 8), Verdict::Refused(4));
        // Who waits does not get what the other one has had.
        let first = Entry { claim: 1, ..waiting };
        assert_eq!(decide(&first, &[rest, own(2, 0)], 8), Verdict::Refused(1));
        assert_eq!(decide(&first, &[entry(1, 0, 3), own(2, 0)], 8), Verdict::Granted);
        // What is there for it is its own from then on.
        assert_eq!([4, 3, 1, 0].map(|rest| can_keep(&waiting, &[entry(1, 0, rest), own(2, 0)], 8)), [0, 1, 3, 3]);
        let kept = Entry { kept: 1, ..waiting };
        assert_eq!(decide(&own(2, 2), &[entry(1, 0, 3), kept], 8), Verdict::Granted);
        assert_eq!(decide(&own(2, 2), &[rest, kept], 8), Verdict::Refused(1));
    }

    #[test]
    fn a_claim_of_another_is_waited_for_and_not_counted_as_missing() {
        let other = Entry { claim: 3, ..entry(1, 0, 2) };
        let own = |claim| Entry { claim, ..entry(0, 0, 2) };
        assert_eq!((room(&own(0), &[other], 8), room(&own(0), &[other], 4)), (1, 0));
        assert_eq!(decide(&own(1), &[other], 8), Verdict::Granted);
        assert_eq!(decide(&own(2), &[other], 8), Verdict::Contended);
        assert_eq!(decide(&own(6), &[other], 8), Verdict::Refused(2));
        assert!(matches!(decide(&own(u64::MAX), &[other], 8), Verdict::Refused(_)));
    }

    #[test]
    fn lower_priorities_give_first_and_nobody_below_its_guarantee() {
        let holder = |number, priority, idle| Entry { priority, idle, ..entry(number, 2, 10) };
        let asker = Entry { priority: 1, wanted: 9, ..entry(9, 0, 0) };
        let (low, more, less, high) = (holder(1, 0, 3), holder(2, 1, 5), holder(3, 1, 4), holder(4, 2, 6));
        let all = [low, more, less, high, asker];
        let given = |own: &Entry, all: &[Entry]| {
            let others: Vec<Entry> = all.iter().copied().filter(|other| other.number != own.number).collect();
            to_give(own, &others)
        };
        assert_eq!(all.map(|own| given(&own, &all)), [3, 5, 1, 0, 0]);
        // It was not answered in time: each gives what it has.
        let late = [low, more, less, high, Entry { rounds: 1, ..asker }];
        assert_eq!(late.map(|own| given(&own, &late)), [3, 5, 4, 0, 0]);
        // Nine of ten pages are idle, and two are guaranteed.
        assert_eq!(given(&holder(1, 0, 9), &[holder(1, 0, 9), asker]), 8);
        // Who asks gives to higher priorities alone.
        let both = [Entry { wanted: 1, ..more }, asker];
        assert_eq!(given(&both[0], &both), 0);
        assert_eq!(given(&Entry { wanted: 1, ..low }, &[low, asker]), 3);
        // What is guaranteed comes from higher priorities, too.
        assert_eq!(given(&high, &[high, Entry { guaranteed: 1, ..asker }]), 6);
        assert!(others_can_give(&asker, &[high, less]) && !others_can_give(&asker, &[high]));
    }

    /// Whatever the entries are, those who give are never short of what is wanted if they have it, and together give no
    /// more than that.
    #[test]
    fn together_they_give_what_is_wanted() {
        let mut random = fastrand::Rng::with_seed(1);
        for round in 0..20_000 {
            let mut entry = |number| {
                let granted = random.u64(0..20);
                let held = random.u64(0..=granted);
                Entry {
                    number,
                    guaranteed: random.u64(0..10),
                    priority: random.u64(0..3),
                    granted,
                    held,
                    idle: random.u64(0..=held),
                    ..Entry::default()
                }
            };
            let mut entries: Vec<Entry> = (0..4).map(&mut entry).collect();
            entries[0].wanted = random.u64(1..30);
            let asker = entries[0];
            let is_short = asker.granted < asker.guaranteed;
            let willing = entries[1..].iter().filter(|other| is_short || other.priority <= asker.priority);
            let has: u64 = willing.map(Entry::spare).sum();
            let given = |own: &Entry| {
                let others: Vec<Entry> = entries.iter().copied().filter(|other| other.number != own.number).collect();
                to_give(own, &others)
            };
            let given: Vec<u64> = entries.iter().map(given).collect();
            assert_eq!(given.iter().sum::<u64>(), has.min(asker.wanted), "round {round}: {entries:?}");
            assert!(given.iter().zip(&entries).all(|(&given, entry)| given <= entry.spare()), "round {round}");
        }
    }
}
