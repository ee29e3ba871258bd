//! Fault injection: a driver whose calls fail by a plan. A failed call does not reach the decorated driver. The same
//! plan over the same calls fails the same ones: it depends on no clock and no source of randomness.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::hooked::{Arguments, Hook, Hooked, Outcome};
use crate::{Call, Driver, DriverError, ErrorCode, Result};

/// A driver whose calls fail by a [`FaultPlan`].
pub type Faulty = Hooked<Faults>;

/// Which calls fail, and with which codes. Calls are numbered from 1, in the order in which they are made.
#[derive(Clone, Debug, Default)]
pub struct FaultPlan {
    rules: Vec<Rule>,
    excluded: Vec<Call>,
}

#[derive(Clone, Debug)]
struct Rule {
    /// The calls that it applies to; all calls if empty.
    calls: Vec<Call>,
    when: When,
    code: ErrorCode,
}

#[derive(Clone, Copy, Debug)]
enum When {
    Nth(u64),
    Fraction { seed: u64, fraction: f64 },
}

impl FaultPlan {
    /// The calls that release something. With these excluded, a scenario can clean up after a fault.
    pub const CLEANUP: &'static [Call] = &[
        Call::ContextRelease,
        Call::PeerDisable,
        Call::StreamDestroy,
        Call::EventDestroy,
        Call::MemFree,
        Call::VmFreeRange,
        Call::VmRelease,
        Call::VmUnmap,
        Call::PoolDestroy,
        Call::PoolFree,
        Call::HostFree,
        Call::HostUnregister,
        Call::GraphDestroy,
        Call::GraphExecDestroy,
        Call::ModuleUnload,
        Call::LibraryDestroy,
    ];

    /// A plan in which nothing fails.
    #[must_use]
    pub const fn new() -> Self {
        Self { rules: Vec::new(), excluded: Vec::new() }
    }

    /// The `nth` call of that kind fails.
    #[must_use]
    pub fn fail_nth(self, call: Call, nth: u64, code: ErrorCode) -> Self {
        self.rule(&[call], When::Nth(nth), code)
    }

    /// The `nth` call of any kind fails.
    #[must_use]
    pub fn fail_nth_of_all(self, nth: u64, code: ErrorCode) -> Self {
        self.rule(&[], When::Nth(nth), code)
    }

    /// A fraction of these calls fails (of all calls, if `calls` is empty), selected by `seed`: none for 0.0, all for
    /// 1.0.
    #[must_use]
    pub fn fail_fraction(self, calls: &[Call], fraction: f64, seed: u64, code: ErrorCode) -> Self {
        assert!((0.0..=1.0).contains(&fraction), "a fraction is between 0 and 1, not {fraction}");
        self.rule(calls, When::Fraction { seed, fraction }, code)
    }

    /// These calls never fail, and are not numbered among all calls; for instance [`CLEANUP`](Self::CLEANUP).
    #[must_use]
    pub fn excluding(mut self, calls: &[Call]) -> Self {
        self.excluded.extend_from_slice(calls);
        self
    }

    fn rule(mut self, calls: &[Call], when: When, code: ErrorCode) -> Self {
        self.rules.push(Rule { calls: calls.to_vec(), when, code });
        self
    }
}

/// A call that the plan failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InjectedFault {
    /// The call.
    pub call: Call,
    /// Its number among calls of its kind, since the plan was set.
    pub nth: u64,
    /// Its number among all calls that are not excluded.
    pub nth_of_all: u64,
    /// The code that it failed with.
    pub code: ErrorCode,
}

impl Faulty {
    /// Fails the calls made to `inner` by `plan`.
    #[must_use]
    pub fn new(inner: Arc<dyn Driver>, plan: FaultPlan) -> Self {
        Self::with_hook(inner, Faults(Mutex::new(State::new(plan))))
    }

    /// Sets another plan. Calls are numbered from 1 again; the injected faults so far are kept. No effect in a forked
    /// child, where all calls fail.
    pub fn set_plan(&self, plan: FaultPlan) {
        if self.is_inherited() {
            return;
        }
        let mut state = self.hook().lock();
        let injected = std::mem::take(&mut state.injected);
        *state = State { injected, ..State::new(plan) };
    }

    /// Fails no calls from now on.
    pub fn clear_plan(&self) {
        self.set_plan(FaultPlan::new());
    }

    /// Every injected fault, in order; none in a forked child.
    #[must_use]
    pub fn injected(&self) -> Vec<InjectedFault> {
        if self.is_inherited() {
            return Vec::new();
        }
        self.hook().lock().injected.clone()
    }
}

/// The hook of a [`Faulty`] driver: its plan and the numbers of calls so far.
#[derive(Debug)]
pub struct Faults(Mutex<State>);

#[derive(Debug)]
struct State {
    plan: FaultPlan,
    /// How many calls of each kind were made.
    seen: Vec<u64>,
    seen_of_all: u64,
    injected: Vec<InjectedFault>,
}

impl State {
    fn new(plan: FaultPlan) -> Self {
        Self { plan, seen: vec![0; Call::ALL.len()], seen_of_all: 0, injected: Vec::new() }
    }

    /// Numbers a call. Returns the fault, if it fails: the first rule that applies decides.
    fn next(&mut self, call: Call) -> Option<InjectedFault> {
        if self.plan.rules.is_empty() || self.plan.excluded.contains(&call) {
            return None;
        }
        self.seen[call as usize] += 1;
        self.seen_of_all += 1;
        let (nth, nth_of_all) = (self.seen[call as usize], self.seen_of_all);
        let rule = self.plan.rules.iter().find(|rule| rule.applies(call, nth, nth_of_all))?;
        let fault = InjectedFault { call, nth, nth_of_all, code: rule.code };
        self.injected.push(fault);
        Some(fault)
    }
}

impl Rule {
    fn applies(&self, call: Call, nth: u64, nth_of_all: u64) -> bool {
        let all = self.calls.is_empty();
        match self.when {
            _ if !all && !self.calls.contains(&call) => false,
            When::Nth(wanted) => wanted == if all { nth_of_all } else { nth },
            When::Fraction { seed, fraction } => unit(seed ^ mix(nth_of_all)) < fraction,
        }
    }
}

impl Faults {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No code under this lock panics in the middle of a change.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Hook for Faults {
    type CallState = ();

    fn before(&self, _: &dyn Driver, call: Call, _: Arguments<'_>) -> Result<()> {
        match self.lock().next(call) {
            None => Ok(()),
            Some(fault) => Err(DriverError::new(call.name(), fault.code)
                .with_detail(format!("injected fault: call {} of its kind, {} of all", fault.nth, fault.nth_of_all))),
        }
    }

    fn after(&self, _: &dyn Driver, _: Call, (): (), _: Outcome<'_>) {}

    fn suballocation(&self, _: Call, _: Arguments<'_>) {}
}

/// A hash of `x`: the finaliser of SplitMix64.
const fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A number in [0, 1) selected by `x`.
fn unit(x: u64) -> f64 {
    // A double has 53 bits of fraction.
    (mix(x) >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decorate::Counting;
    use crate::sim::{SimConfig, SimDriver};
    use crate::{DeviceId, DevicePtr, Devices, Memory, Suballocations};

    const DEVICE: DeviceId = DeviceId(0);

    fn faulty(plan: FaultPlan) -> Faulty {
        Faulty::new(Arc::new(SimDriver::new(SimConfig::default())), plan)
    }

    /// Ten rounds of two calls, as a picture: `.` for a call that succeeded, `x` for one that failed.
    fn picture(driver: &dyn Driver) -> String {
        let mut picture = String::new();
        for _ in 0..10 {
            let (alloc, info) = (driver.mem_alloc(DEVICE, 4096), driver.mem_info(DEVICE));
            picture.push(if alloc.is_ok() { '.' } else { 'x' });
            picture.push(if info.is_ok() { '.' } else { 'x' });
            if let Ok(ptr) = alloc {
                driver.mem_free(ptr).unwrap();
            }
        }
        picture
    }

    #[test]
    fn plan_fails_the_calls_it_names() {
        let oom = ErrorCode::OutOfMemory;
        let keep_cleanup = |plan: FaultPlan| plan.excluding(FaultPlan::CLEANUP);
        let check = |plan, expected: &str| assert_eq!(picture(&faulty(keep_cleanup(plan))), expected);
        check(FaultPlan::new(), "....................");
        check(FaultPlan::new().fail_nth(Call::MemAlloc, 3, oom), "....x...............");
        check(FaultPlan::new().fail_nth_of_all(4, oom), "...x................");
        check(FaultPlan::new().fail_nth_of_all(1, oom).fail_nth(Call::MemInfo, 10, oom), "x..................x");
        check(FaultPlan::new().fail_fraction(&[Call::MemAlloc], 1.0, 7, oom), "x.x.x.x.x.x.x.x.x.x.");
        check(FaultPlan::new().fail_fraction(&[], 0.0, 7, oom), "....................");
        check(FaultPlan::new().fail_fraction(&[], 1.0, 7, oom).excluding(&[Call::MemInfo]), "x.x.x.x.x.x.x.x.x.x.");
    }

    #[test]
    fn fraction_is_met_and_depends_only_on_the_seed() {
        const COUNT: usize = if cfg!(miri) { 400 } else { 4000 };
        let draw = |seed| {
            let mut state = State::new(FaultPlan::new().fail_fraction(&[], 0.25, seed, ErrorCode::NotReady));
            (0..COUNT).map(|_| state.next(Call::MemInfo).is_some()).collect::<Vec<_>>()
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
        let failed = draw(3).into_iter().filter(|&failed| failed).count();
        assert!((COUNT / 5..COUNT / 3).contains(&failed), "{failed} of {COUNT}");
    }

    #[test]
    fn failed_call_does_not_reach_the_decorated_driver() {
        let counting = Arc::new(Counting::new(Arc::new(SimDriver::new(SimConfig::default()))));
        let plan = FaultPlan::new().fail_nth(Call::MemAlloc, 1, ErrorCode::Unknown(4242));
        let faulty = Arc::new(Faulty::new(counting.clone(), plan));
        let outer = Counting::new(faulty.clone());

        let error = outer.mem_alloc(DEVICE, 4096).unwrap_err();
        assert_eq!((error.call, error.code), ("mem_alloc", ErrorCode::Unknown(4242)));
        assert_eq!(error.detail.as_deref(), Some("injected fault: call 1 of its kind, 1 of all"));
        assert_eq!(counting.count(Call::MemAlloc).calls, 0);
        assert_eq!((outer.count(Call::MemAlloc).calls, outer.count(Call::MemAlloc).errors), (1, 1));
        let fired = InjectedFault { call: Call::MemAlloc, nth: 1, nth_of_all: 1, code: ErrorCode::Unknown(4242) };
        assert_eq!(faulty.injected(), [fired]);
    }

    #[test]
    fn plan_can_change_and_suballocation_reports_never_fail() {
        let driver = faulty(FaultPlan::new().fail_fraction(&[], 1.0, 0, ErrorCode::NotPermitted));
        driver.suballocated(DevicePtr(0), 0, crate::StreamId(0));
        assert_eq!(driver.injected(), []);
        driver.device_count().unwrap_err();
        driver.clear_plan();
        driver.device_count().unwrap();
        driver.set_plan(FaultPlan::new().fail_nth_of_all(1, ErrorCode::NoDevice));
        assert_eq!(driver.device_count().unwrap_err().code, ErrorCode::NoDevice);
        assert_eq!(driver.injected().len(), 2);
    }
}
