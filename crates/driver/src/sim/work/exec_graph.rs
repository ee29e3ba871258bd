//! Graphs: the template that a capture leaves, and the flat form that runs.
//!
//! In the flat form bodies of conditional nodes stand in the same list as the nodes around them, so that one table
//! answers which node comes before which. The nodes are cut into chains; for each node the table holds how far it is
//! behind each chain.

use crate::sim::order::Point;
use crate::sim::work::Work;
use crate::{ConditionalId, DeviceId, DevicePtr, GraphTopology, Node, NodeId, PoolId, StreamId};

/// A captured node.
#[derive(Clone, Debug)]
pub struct TemplateNode {
    pub id: NodeId,
    /// The number of the call that captured it.
    pub at: u64,
    pub work: Work,
    pub nanos: u64,
    /// The nodes before it, by their places.
    pub deps: Vec<u32>,
    pub stream: StreamId,
}

/// A captured graph.
#[derive(Debug)]
pub struct Template {
    pub device: DeviceId,
    pub nodes: Vec<TemplateNode>,
    /// The flags of its conditional nodes with their values at the start, those of bodies included once they are
    /// inlined.
    pub flags: Vec<(ConditionalId, u32)>,
    /// Memory that its nodes allocate, with the pool it comes from.
    pub memory: Vec<(DevicePtr, PoolId)>,
}

impl Template {
    pub fn topology(&self) -> GraphTopology {
        topology(&self.nodes)
    }

    /// Whether one of its nodes frees `ptr`.
    pub fn frees(&self, ptr: DevicePtr) -> bool {
        self.nodes.iter().any(|node| matches!(node.work, Work::PoolFree { ptr: known } if known == ptr))
    }

    /// The graph as text in the DOT language.
    pub fn dot(&self) -> String {
        let mut text = String::from("digraph warpool {\n");
        for (place, node) in self.nodes.iter().enumerate() {
            let label = match &node.work {
                Work::Kernel(kernel) => kernel.mirror.name.to_owned(),
                other => format!("{:?}", other.node_kind()),
            };
            text += &format!("  n{place} [label=\"{place}\\n{label}\"];\n");
        }
        for (place, node) in self.nodes.iter().enumerate() {
            for dep in &node.deps {
                text += &format!("  n{dep} -> n{place};\n");
            }
        }
        text + "}\n"
    }
}

/// The shape of these nodes, as the contract shows it.
pub fn topology(nodes: &[TemplateNode]) -> GraphTopology {
    GraphTopology {
        nodes: nodes.iter().map(|node| Node { id: node.id, kind: node.work.node_kind() }).collect(),
        edges: nodes.iter().flat_map(|node| node.deps.iter().map(|&dep| (nodes[dep as usize].id, node.id))).collect(),
    }
}

/// A node ready to run.
#[derive(Debug)]
pub struct ExecNode {
    pub id: NodeId,
    pub at: u64,
    pub work: Work,
    pub nanos: u64,
    /// How many nodes of its own body come right before it.
    pub preds: u32,
    /// The nodes of its own body that come right after it.
    pub succs: Vec<u32>,
    /// Which body it is in; 0 is the graph itself.
    pub body: u32,
    /// The body that it runs, if it is a conditional.
    pub runs: Option<u32>,
    /// The outermost conditional node that it is within, counted from 1; 0 for none.
    outer: u32,
}

/// A graph ready to run.
#[derive(Debug)]
pub struct ExecGraph {
    pub device: DeviceId,
    pub nodes: Vec<ExecNode>,
    /// The nodes of each body.
    pub bodies: Vec<Vec<u32>>,
    /// The conditional node that runs each body; none for the first.
    pub owner: Vec<Option<u32>>,
    pub flags: Vec<(ConditionalId, u32)>,
    /// Where each node stands: its chain, and its place there counted from 1.
    chain: Vec<(u32, u32)>,
    /// For each node and chain, the last place of the chain that comes before the node or is it.
    behind: Vec<u32>,
    chains: usize,
}

impl ExecGraph {
    /// Flattens a template. Fails if a conditional's body was never captured to its end, or holds what bodies may not.
    pub fn new(template: &Template) -> Result<Self, &'static str> {
        let mut builder = Builder::default();
        builder.body(None);
        builder.inline(template, 0, 0)?;
        Ok(builder.finish(template.device))
    }

    /// Where the node of that name stands, unless it is in a body: those belong to templates of their own.
    pub fn place_of(&self, node: NodeId) -> Option<u32> {
        let own = &self.bodies[0];
        // Names count upwards in the order of capture.
        let at = own.binary_search_by_key(&node, |&place| self.nodes[place as usize].id).ok()?;
        Some(own[at])
    }

    /// Whether the node at `a` is known to have run before the one at `b`, given that it has.
    pub fn ordered(&self, a: Point, b: Point) -> bool {
        let outer = |point: Point| self.nodes[point.node as usize].outer;
        if a.node == b.node || (outer(a) != 0 && outer(a) == outer(b) && a.run != b.run) {
            // Runs of a body follow each other. (Two bodies side by side within one run count as ordered too: rather
            // miss a hazard there than invent one.)
            return true;
        }
        let (chain, place) = self.chain[a.node as usize];
        self.behind[b.node as usize * self.chains + chain as usize] >= place
    }
}

#[derive(Default)]
struct Builder {
    nodes: Vec<ExecNode>,
    bodies: Vec<Vec<u32>>,
    owner: Vec<Option<u32>>,
    flags: Vec<(ConditionalId, u32)>,
    /// For each node, what comes before it in any way.
    before: Vec<Vec<u32>>,
    /// For each node, the nodes that are all done once it is: itself, or with its body.
    ends: Vec<Vec<u32>>,
}

impl Builder {
    fn body(&mut self, owner: Option<u32>) -> u32 {
        self.bodies.push(Vec::new());
        self.owner.push(owner);
        (self.bodies.len() - 1) as u32
    }

    /// Adds the nodes of `template` to `body`, and behind each conditional node those of its own body.
    fn inline(&mut self, template: &Template, body: u32, outer: u32) -> Result<(), &'static str> {
        self.flags.extend(&template.flags);
        let mut places: Vec<u32> = Vec::with_capacity(template.nodes.len());
        for node in &template.nodes {
            if body != 0 && !node.work.is_allowed_in_body() {
                return Err("a conditional's body holds something other than kernels, copies, fills and conditionals");
            }
            let deps = node.deps.iter().map(|&dep| places[dep as usize]).collect();
            let place = self.add(node, body, deps, outer);
            places.push(place);
            if let Work::Conditional { body: captured, .. } = &node.work {
                let inner = self.body(Some(place));
                self.nodes[place as usize].runs = Some(inner);
                let first = self.nodes.len() as u32;
                let captured = captured.get().ok_or("a conditional's body was not captured to its end")?;
                self.inline(captured, inner, if outer == 0 { place + 1 } else { outer })?;
                let within = first..self.nodes.len() as u32;
                for node in within.clone() {
                    self.before[node as usize].push(place);
                }
                self.ends[place as usize].extend(within);
            }
        }
        Ok(())
    }

    fn add(&mut self, node: &TemplateNode, body: u32, deps: Vec<u32>, outer: u32) -> u32 {
        let place = self.nodes.len() as u32;
        for &dep in &deps {
            self.nodes[dep as usize].succs.push(place);
        }
        self.before.push(deps.iter().flat_map(|&dep| self.ends[dep as usize].clone()).collect());
        self.ends.push(vec![place]);
        self.bodies[body as usize].push(place);
        self.nodes.push(ExecNode {
            id: node.id,
            at: node.at,
            work: node.work.clone(),
            nanos: node.nanos,
            preds: deps.len() as u32,
            succs: Vec::new(),
            body,
            runs: None,
            outer,
        });
        place
    }

    fn finish(self, device: DeviceId) -> ExecGraph {
        let mut chain: Vec<(u32, u32)> = Vec::with_capacity(self.nodes.len());
        let mut tails: Vec<u32> = Vec::new();
        for (place, before) in self.before.iter().enumerate() {
            let extend = before.iter().find(|&&dep| tails[chain[dep as usize].0 as usize] == dep);
            let at = match extend {
                Some(&dep) => (chain[dep as usize].0, chain[dep as usize].1 + 1),
                None => {
                    tails.push(0);
                    ((tails.len() - 1) as u32, 1)
                }
            };
            tails[at.0 as usize] = place as u32;
            chain.push(at);
        }
        let chains = tails.len();
        let mut behind = vec![0; self.nodes.len() * chains];
        for (place, before) in self.before.iter().enumerate() {
            for &dep in before {
                for c in 0..chains {
                    let theirs = behind[dep as usize * chains + c];
                    let mine = &mut behind[place * chains + c];
                    *mine = theirs.max(*mine);
                }
            }
            let (own, position) = chain[place];
            behind[place * chains + own as usize] = position;
        }
        let Self { nodes, bodies, owner, flags, .. } = self;
        ExecGraph { device, nodes, bodies, owner, flags, chain, behind, chains }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::GraphExecId;

    fn template(deps: &[&[u32]]) -> Template {
        let nodes = deps
            .iter()
            .enumerate()
            .map(|(place, deps)| TemplateNode {
                id: NodeId(place as u64),
                at: 0,
                work: Work::Marker,
                nanos: 0,
                deps: deps.to_vec(),
                stream: StreamId(1),
            })
            .collect();
        Template { device: DeviceId(0), nodes, flags: Vec::new(), memory: Vec::new() }
    }

    fn order(graph: &ExecGraph) -> Vec<String> {
        let at = |node| Point { exec: GraphExecId(1), node, run: 0, captured_at: 0 };
        let n = graph.nodes.len() as u32;
        (0..n).map(|b| (0..n).filter(|&a| graph.ordered(at(a), at(b))).map(|a| a.to_string()).collect()).collect()
    }

    #[test]
    fn a_diamond_orders_its_corners_but_not_its_sides() {
        let graph = ExecGraph::new(&template(&[&[], &[0], &[0], &[1, 2]])).expect("no bodies");
        assert_eq!(order(&graph), ["0", "01", "02", "0123"]);
        assert_eq!(graph.chains, 2);
    }

    #[test]
    fn what_follows_a_conditional_follows_its_body() {
        let body = Arc::new(OnceBody::new());
        body.set(Arc::new(template(&[&[], &[]]))).expect("unset");
        let mut outer = template(&[&[], &[0], &[]]);
        outer.nodes[0].work = Work::Conditional { flag: ConditionalId(1), kind: crate::ConditionalKind::While, body };
        let graph = ExecGraph::new(&outer).expect("the body is set");
        // 0 runs 1 and 2; 3 follows all of them; 4 stands alone.
        assert_eq!(order(&graph), ["0", "01", "02", "0123", "4"]);
        assert_eq!(graph.bodies, [vec![0, 3, 4], vec![1, 2]]);
    }

    type OnceBody = std::sync::OnceLock<Arc<Template>>;
}
