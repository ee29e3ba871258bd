//! The effect of the kernel, and the nodes of a captured graph by the rules of the contract.

use super::program::{EVENTS, GraphPlan, GraphStep, Operation};

/// A node of a graph, loops unrolled.
pub struct Unrolled {
    /// Its index in the flat graph: in the order of capture, bodies after their conditional node.
    pub flat: u32,
    pub operation: Option<Operation>,
    pub deps: Vec<usize>,
    pub branch: usize,
}

/// The nodes of a graph by the rules of capture, each body as often as it runs.
pub fn unroll(plan: &GraphPlan) -> Vec<Unrolled> {
    let mut nodes: Vec<Unrolled> = Vec::new();
    let mut deps: Vec<Vec<usize>> = vec![Vec::new(); plan.branches.len()];
    let mut events: [Vec<usize>; EVENTS] = Default::default();
    let mut flat = 0;
    for step in &plan.steps {
        match step {
            GraphStep::Record { event, branch } => events[*event] = deps[*branch].clone(),
            GraphStep::Wait { branch, event } => deps[*branch].extend(events[*event].clone()),
            GraphStep::Work(branch, operation) => {
                let before = std::mem::replace(&mut deps[*branch], vec![nodes.len()]);
                nodes.push(Unrolled { flat, operation: Some(*operation), deps: before, branch: *branch });
                flat += 1;
            }
            GraphStep::Conditional { branch, runs, body, .. } => {
                let mut before = std::mem::take(&mut deps[*branch]);
                // The fill of the counter and the conditional node; then in each run the countdown and the body.
                let head = [(flat, None), (flat + 1, None)];
                let round: Vec<_> = std::iter::once((flat + 2, None))
                    .chain(body.iter().enumerate().map(|(at, operation)| (flat + 3 + at as u32, Some(*operation))))
                    .collect();
                let rounds = round.iter().copied().cycle().take(round.len() * *runs as usize);
                for (flat, operation) in head.into_iter().chain(rounds) {
                    let place = nodes.len();
                    nodes.push(Unrolled {
                        flat,
                        operation,
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

/// The kernel.
pub fn mix(to: &mut [u8], from: &[u8], salt: u32) {
    for (at, byte) in to.iter_mut().enumerate() {
        *byte = byte.wrapping_mul(5).wrapping_add(from[at % from.len()]).wrapping_add(salt as u8);
    }
}
