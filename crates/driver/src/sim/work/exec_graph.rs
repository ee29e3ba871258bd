//! A graph in the flat form that is executed.
//!
//! The nodes in bodies of conditional nodes are in one list with the nodes around them, so that one table has the
//! order among all of them.

use super::item::{Template, TemplateNode, Work};
use crate::sim::order::NodeOrder;
use crate::{ConditionalId, DeviceId, NodeId};

/// A node ready to run.
#[derive(Debug)]
pub struct ExecNode {
    pub id: NodeId,
    pub captured_at: u64,
    pub work: Work,
    pub nanos: u64,
    /// The number of nodes of its own body that it depends on directly.
    pub predecessors: u32,
    /// The nodes of its own body that depend on it directly.
    pub successors: Vec<u32>,
    /// The body that it is in; 0 is the graph itself.
    pub body: u32,
    /// The body that it runs, if it is a conditional node.
    pub conditional_body: Option<u32>,
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
    /// All flags with their initial values, those of bodies included.
    pub flags: Vec<(ConditionalId, u32)>,
    pub order: NodeOrder,
}

impl ExecGraph {
    /// Flattens a template. Fails if the capture of a conditional node's body did not end, or if a body contains what
    /// bodies may not.
    pub fn new(template: &Template) -> Result<Self, &'static str> {
        let mut builder = Builder::default();
        builder.add_body(None);
        builder.inline(template, 0, 0)?;
        Ok(builder.finish(template.device))
    }

    /// The index of a node, unless it is in a body: those nodes belong to templates of their own.
    pub fn index_of(&self, node: NodeId) -> Option<u32> {
        let own = &self.bodies[0];
        // Ids ascend in the order of capture.
        let position = own.binary_search_by_key(&node, |&index| self.nodes[index as usize].id).ok()?;
        Some(own[position])
    }
}

#[derive(Default)]
struct Builder {
    nodes: Vec<ExecNode>,
    bodies: Vec<Vec<u32>>,
    owner: Vec<Option<u32>>,
    flags: Vec<(ConditionalId, u32)>,
    /// For each node, nodes that are ordered before it.
    before: Vec<Vec<u32>>,
    /// For each node, the nodes that are all done once it is: itself, and those of its body.
    ends: Vec<Vec<u32>>,
    /// For each node, the outermost conditional node around it, counted from 1; 0 for none.
    outermost: Vec<u32>,
}

impl Builder {
    fn add_body(&mut self, owner: Option<u32>) -> u32 {
        self.bodies.push(Vec::new());
        self.owner.push(owner);
        (self.bodies.len() - 1) as u32
    }

    /// Adds the nodes of `template` to `body`, and after each conditional node those of its own body.
    fn inline(&mut self, template: &Template, body: u32, outermost: u32) -> Result<(), &'static str> {
        self.flags.extend(&template.flags);
        let mut indices: Vec<u32> = Vec::with_capacity(template.nodes.len());
        for node in &template.nodes {
            if body != 0 && !node.work.is_allowed_in_body() {
                return Err("the body of a conditional node may contain only kernels, copies, fills and conditionals");
            }
            let dependencies = node.dependencies.iter().map(|&other| indices[other as usize]).collect();
            let index = self.add(node, body, dependencies, outermost);
            indices.push(index);
            if let Work::Conditional { body: captured, .. } = &node.work {
                let inner = self.add_body(Some(index));
                self.nodes[index as usize].conditional_body = Some(inner);
                let first = self.nodes.len() as u32;
                let captured = captured.get().ok_or("the capture of a conditional node's body did not end")?;
                self.inline(captured, inner, if outermost == 0 { index + 1 } else { outermost })?;
                let within = first..self.nodes.len() as u32;
                for node in within.clone() {
                    self.before[node as usize].push(index);
                }
                self.ends[index as usize].extend(within);
            }
        }
        Ok(())
    }

    fn add(&mut self, node: &TemplateNode, body: u32, dependencies: Vec<u32>, outermost: u32) -> u32 {
        let index = self.nodes.len() as u32;
        for &other in &dependencies {
            self.nodes[other as usize].successors.push(index);
        }
        self.before.push(dependencies.iter().flat_map(|&other| self.ends[other as usize].clone()).collect());
        self.ends.push(vec![index]);
        self.outermost.push(outermost);
        self.bodies[body as usize].push(index);
        self.nodes.push(ExecNode {
            id: node.id,
            captured_at: node.captured_at,
            work: node.work.clone(),
            nanos: node.nanos,
            predecessors: dependencies.len() as u32,
            successors: Vec::new(),
            body,
            conditional_body: None,
        });
        index
    }

    fn finish(self, device: DeviceId) -> ExecGraph {
        let Self { nodes, bodies, owner, flags, before, outermost, .. } = self;
        ExecGraph { device, nodes, bodies, owner, flags, order: NodeOrder::new(&before, outermost) }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, OnceLock};

    use super::*;
    use crate::sim::order::NodeInstance;
    use crate::{ConditionalKind, GraphExecId, StreamId};

    fn template(dependencies: &[&[u32]]) -> Template {
        let node = |(index, dependencies): (usize, &&[u32])| TemplateNode {
            id: NodeId(index as u64),
            captured_at: 0,
            work: Work::Marker,
            nanos: 0,
            dependencies: dependencies.to_vec(),
            stream: StreamId(1),
        };
        let nodes = dependencies.iter().enumerate().map(node).collect();
        Template { device: DeviceId(0), nodes, flags: Vec::new(), memory: Vec::new() }
    }

    /// For each node the nodes before it, and itself.
    fn order(graph: &ExecGraph) -> Vec<String> {
        let instance = |node| NodeInstance { exec: GraphExecId(1), node, iteration: 0, captured_at: 0 };
        let is_before = |a, b| graph.order.is_before(instance(a), instance(b));
        let n = graph.nodes.len() as u32;
        (0..n).map(|b| (0..n).filter(|&a| is_before(a, b)).map(|a| a.to_string()).collect()).collect()
    }

    #[test]
    fn a_diamond_orders_its_corners_but_not_its_sides() {
        let graph = ExecGraph::new(&template(&[&[], &[0], &[0], &[1, 2]])).expect("no bodies");
        assert_eq!(order(&graph), ["0", "01", "02", "0123"]);
        assert_eq!(graph.order.chains(), 2);
    }

    #[test]
    fn successors_of_a_conditional_node_are_ordered_after_its_body() {
        let body = Arc::new(OnceLock::new());
        body.set(Arc::new(template(&[&[], &[]]))).expect("unset");
        let mut outer = template(&[&[], &[0], &[]]);
        outer.nodes[0].work = Work::Conditional { flag: ConditionalId(1), kind: ConditionalKind::While, body };
        let graph = ExecGraph::new(&outer).expect("the body is set");
        // 0 runs 1 and 2; 3 follows all of them; 4 is independent.
        assert_eq!(order(&graph), ["0", "01", "02", "0123", "4"]);
        assert_eq!(graph.bodies, [vec![0, 3, 4], vec![1, 2]]);
    }
}
