//! Captured graphs and executable graphs by id.

use std::sync::Arc;

use crate::sim::table::{Missing, Table};
use crate::sim::work::{ExecGraph, ReplacedKernel, ReplacedKernels, StreamPoint, Template};
use crate::{GraphExecId, GraphId, InstantiateOptions};

/// An executable graph.
#[derive(Clone, Debug)]
pub struct Exec {
    pub graph: Arc<ExecGraph>,
    pub template: Arc<Template>,
    /// The id of the template, which must exist for its nodes to be named.
    pub template_id: GraphId,
    /// Kernels whose arguments were replaced.
    pub kernels: Arc<ReplacedKernels>,
    pub options: InstantiateOptions,
    /// The last launch, which the next one is ordered after.
    pub last_launch: Option<StreamPoint>,
}

/// All graphs. A template is shared by its id, its executables, their launches, and, if it is the body of a
/// conditional node, by that node.
#[derive(Debug, Default)]
pub struct Graphs {
    templates: Table<Arc<Template>>,
    execs: Table<Exec>,
}

impl Graphs {
    pub fn add_template(&mut self, template: Arc<Template>) -> GraphId {
        GraphId(self.templates.insert(template))
    }

    pub fn template(&self, graph: GraphId) -> Result<&Arc<Template>, Missing> {
        self.templates.get(graph.0).ok_or_else(|| self.templates.why_missing(graph.0))
    }

    pub fn remove_template(&mut self, graph: GraphId) -> Arc<Template> {
        self.templates.remove(graph.0).expect("a graph that was looked up")
    }

    pub fn add_exec(&mut self, exec: Exec) -> GraphExecId {
        GraphExecId(self.execs.insert(exec))
    }

    pub fn exec(&self, exec: GraphExecId) -> Result<&Exec, Missing> {
        self.execs.get(exec.0).ok_or_else(|| self.execs.why_missing(exec.0))
    }

    pub fn remove_exec(&mut self, exec: GraphExecId) -> Exec {
        self.execs.remove(exec.0).expect("an executable that was looked up")
    }

    /// Replaces the arguments of a kernel. Launches already queued keep theirs.
    pub fn replace_kernel(&mut self, exec: GraphExecId, node: u32, kernel: ReplacedKernel) {
        let state = self.execs.get_mut(exec.0).expect("an executable that was looked up");
        Arc::make_mut(&mut state.kernels).insert(node, kernel);
    }

    pub fn set_last_launch(&mut self, exec: GraphExecId, launch: StreamPoint) {
        self.execs.get_mut(exec.0).expect("an executable that was looked up").last_launch = Some(launch);
    }

    /// The numbers of templates and executables.
    pub fn counts(&self) -> (usize, usize) {
        (self.templates.len(), self.execs.len())
    }
}
