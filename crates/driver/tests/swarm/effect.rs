//! What a kernel does to bytes, and which nodes a captured graph has, as the contract says.

use super::program::{Act, EVENTS, GraphPlan, GraphStep};

/// A node of a graph, loops unrolled.
pub struct Unrolled {
    /// Its number as the device counts: in the order of capture, bodies behind their conditional.
    pub flat: u32,
    pub act: Option<Act>,
    pub deps: Vec<usize>,
    pub branch: usize,
}

/// The nodes of a graph by the rules of capture, each conditional's body as often as it runs.
pub fn unroll(plan: &GraphPlan) -> Vec<Unrolled> {
    let mut nodes: Vec<Unrolled> = Vec::new();
    let mut deps: Vec<Vec<usize>> = vec![Vec::new(); plan.branches.len()];
    let mut events: [Vec<usize>; EVENTS] = Default::default();
    let mut flat = 0;
    for step in &plan.steps {
        match step {
            GraphStep::Record { event, branch } => events[*event] = deps[*branch].clone(),
            GraphStep::Wait { branch, event } => deps[*branch].extend(events[*event].clone()),
            GraphStep::Work(branch, act) => {
                let before = std::mem::replace(&mut deps[*branch], vec![nodes.len()]);
                nodes.push(Unrolled { flat, act: Some(*act), deps: before, branch: *branch });
                flat += 1;
            }
            GraphStep::Conditional { branch, runs, body, .. } => {
                let mut before = std::mem::take(&mut deps[*branch]);
                // The fill of the counter and the conditional; then in each run the countdown and the body.
                let head = [(flat, None), (flat + 1, None)];
                let round: Vec<_> = std::iter::once((flat + 2, None))
                    .chain(body.iter().enumerate().map(|(at, act)| (flat + 3 + at as u32, Some(*act))))
                    .collect();
                let rounds = round.iter().copied().cycle().take(round.len() * *runs as usize);
                for (flat, act) in head.into_iter().chain(rounds) {
                    let place = nodes.len();
                    nodes.push(Unrolled {
                        flat,
                        act,
                        deps: std::mem::replace(&mut before, vec![place]),
                        branch: *branch,
                    });
                }
                deps[*branch] = before;
                flat += round.len() as u32 + 2;
            }
        }
    }
    nodes
}

/// What the kernel does.
pub fn mix(to: &mut [u8], from: &[u8], salt: u32) {
    for (at, byte) in to.iter_mut().enumerate() {
        *byte = byte.wrapping_mul(5).wrapping_add(from[at % from.len()]).wrapping_add(salt as u8);
    }
}
