//! Library handles, cuBLAS and generators on the simulated GPU.

#[path = "../common/mod.rs"]
mod common;

mod blas;
mod blas_captures;
mod blas_workspaces;
mod generator;
mod generator_graph;
mod handle_swarm;
mod handles;
