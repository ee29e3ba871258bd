//! The order among the nodes of a graph, in a form that answers "is a before b" at once.
//!
//! The nodes are divided into chains, in which each node is a predecessor of the next. For every node and every chain,
//! a table has the last position of the chain that is ordered before the node.

use crate::GraphExecId;

/// One execution of a node of a launched graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeInstance {
    pub exec: GraphExecId,
    pub node: u32,
    /// The body of a conditional node can run many times in one launch; this numbers all such runs. 0 outside bodies.
    pub iteration: u32,
    /// The number of the call that captured the node, or that last replaced its arguments.
    pub captured_at: u64,
}

/// The order among the nodes of a graph, those in bodies of conditional nodes included.
#[derive(Debug)]
pub struct NodeOrder {
    /// For each node its chain, and its position in the chain counted from 1.
    chain: Vec<(u32, u32)>,
    /// For each node and chain, the last position of the chain that is before the node or is the node.
    reached: Vec<u32>,
    chains: usize,
    /// For each node the outermost conditional node around it, counted from 1; 0 if there is none.
    outermost: Vec<u32>,
}

impl NodeOrder {
    /// From the predecessors of each node, all of which have lower numbers, and the outermost conditional node around
    /// each node (counted from 1; 0 for none).
    pub fn new(predecessors: &[Vec<u32>], outermost: Vec<u32>) -> Self {
        let mut chain: Vec<(u32, u32)> = Vec::with_capacity(predecessors.len());
        let mut tails: Vec<u32> = Vec::new();
        for (node, before) in predecessors.iter().enumerate() {
            let extended = before.iter().find(|&&other| tails[chain[other as usize].0 as usize] == other);
            let position = match extended {
                Some(&other) => (chain[other as usize].0, chain[other as usize].1 + 1),
                None => {
                    tails.push(0);
                    ((tails.len() - 1) as u32, 1)
                }
            };
            tails[position.0 as usize] = node as u32;
            chain.push(position);
        }
        let chains = tails.len();
        let mut reached = vec![0; predecessors.len() * chains];
        for (node, before) in predecessors.iter().enumerate() {
            for &other in before {
                for c in 0..chains {
                    let theirs = reached[other as usize * chains + c];
                    let mine = &mut reached[node * chains + c];
                    *mine = theirs.max(*mine);
                }
            }
            let (own, position) = chain[node];
            reached[node * chains + own as usize] = position;
        }
        Self { chain, reached, chains, outermost }
    }

    /// Whether `a`, which has run, is ordered before `b`. Both are of the same launch.
    pub fn is_before(&self, a: NodeInstance, b: NodeInstance) -> bool {
        let outermost = |instance: NodeInstance| self.outermost[instance.node as usize];
        let same_loop = outermost(a) != 0 && outermost(a) == outermost(b);
        if a.node == b.node || (same_loop && a.iteration != b.iteration) {
            // Iterations of a body follow each other. (Two bodies side by side within one iteration count as ordered
            // too: a missed hazard there is better than a false one.)
            return true;
        }
        let (chain, position) = self.chain[a.node as usize];
        self.reached[b.node as usize * self.chains + chain as usize] >= position
    }

    #[cfg(test)]
    pub fn chains(&self) -> usize {
        self.chains
    }
}
