//! New arguments for kernels of executable graphs, beyond the contract: what the simulated driver refuses, and how long
//! the kernels take.

use crate::fixture::{DEVICE, Fixture, KERNELS, WORDS};
use warpool_driver::sim::{HazardKind, SimConfig};
use warpool_driver::*;

/// A kernel whose argument is its duration.
static TIMED: KernelSource = KernelSource {
    name: "timed",
    cuda: "",
    host_kernels: &[HostKernel {
        name: "timed",
        run: |_| Ok(()),
        nanos: Some(|_, args| if let Some(&KernelArg::U64(nanos)) = args.first() { nanos } else { 0 }),
    }],
};

/// A graph of one kernel that adds 1, its executable and its node.
fn adder(fixture: &Fixture) -> Result<(GraphId, GraphExecId, NodeId)> {
    fixture.gpu.capture_begin(fixture.one, CaptureMode::Relaxed)?;
    fixture.add(fixture.memory, WORDS, 1, fixture.one)?;
    let graph = fixture.gpu.capture_end(fixture.one)?;
    let exec = fixture.gpu.graph_instantiate(graph, InstantiateOptions::default())?;
    Ok((graph, exec, fixture.gpu.graph_topology(graph)?.nodes[0].id))
}

fn refused(what: &str, result: Result<()>, code: ErrorCode, part: &str) {
    let error = result.expect_err(what);
    assert_eq!(error.code, code, "{what}: {error}");
    assert!(error.to_string().contains(part), "{what}: {error} does not contain {part:?}");
}

#[test]
fn the_function_of_a_kernel_node_cannot_change() -> Result<()> {
    let fixture = Fixture::new(SimConfig::default())?;
    let (graph, exec, node) = adder(&fixture)?;
    let args = [fixture.memory.into(), KernelArg::U32(WORDS), KernelArg::U32(2)];
    let set = |node, function| fixture.gpu.graph_exec_set_kernel(exec, node, function, LaunchShape::ONE, &args);
    let module = fixture.gpu.module_load(DEVICE, &KERNELS)?;
    let (same_kernel, sum) = (fixture.gpu.function_get(module, "add")?, fixture.gpu.function_get(module, "sum")?);
    refused("another function", set(node, sum), ErrorCode::InvalidValue, "was captured as add");
    refused(
        "the same kernel of another module",
        set(node, same_kernel),
        ErrorCode::InvalidValue,
        "was captured as add",
    );
    refused("another node", set(NodeId(77), fixture.add), ErrorCode::InvalidValue, "node 77");
    fixture.gpu.module_unload(module)?;
    refused("an unloaded one", set(node, same_kernel), ErrorCode::InvalidHandle, "destroyed");
    set(node, fixture.add)?;
    fixture.gpu.graph_destroy(graph)?;
    refused("a destroyed template", set(node, fixture.add), ErrorCode::InvalidValue, &graph.to_string());
    assert_eq!(
        fixture.gpu.hazards().iter().map(|hazard| hazard.kind).collect::<Vec<_>>(),
        [HazardKind::UseAfterDestroy]
    );
    Ok(())
}

#[test]
fn kernels_of_libraries_cannot_be_changed() -> Result<()> {
    let fixture = Fixture::new(SimConfig::default())?;
    fixture.fill(0, fixture.one)?;
    let handle = fixture.gpu.library_create(Library::Blas, DEVICE)?;
    fixture.gpu.library_set_stream(handle, fixture.one)?;
    let matrix = BlasMatrix { ptr: fixture.memory, stride: 1, transposed: false };
    let c = BlasMatrix { ptr: fixture.memory.offset(64), ..matrix };
    fixture.gpu.capture_begin(fixture.one, CaptureMode::Relaxed)?;
    fixture.gpu.blas_sgemm(handle, &Sgemm { m: 1, n: 1, k: 1, alpha: 1.0, a: matrix, b: matrix, beta: 0.0, c })?;
    let graph = fixture.gpu.capture_end(fixture.one)?;
    let exec = fixture.gpu.graph_instantiate(graph, InstantiateOptions::default())?;
    let node = fixture.gpu.graph_topology(graph)?.nodes[0];
    assert_eq!(node.kind, NodeKind::Kernel);
    let shape = LaunchShape { grid: [1; 3], block: [16, 16, 1], shared_bytes: 0 };
    let set = fixture.gpu.graph_exec_set_kernel(exec, node.id, fixture.add, shape, &[]);
    refused("a product", set, ErrorCode::InvalidValue, "was captured as sgemm");
    Ok(())
}

#[test]
fn new_arguments_change_the_duration() -> Result<()> {
    let fixture = Fixture::new(SimConfig::default())?;
    let module = fixture.gpu.module_load(DEVICE, &TIMED)?;
    let timed = fixture.gpu.function_get(module, "timed")?;
    fixture.gpu.capture_begin(fixture.one, CaptureMode::Relaxed)?;
    fixture.gpu.kernel_launch(timed, LaunchShape::ONE, &[KernelArg::U64(1_000)], fixture.one)?;
    let graph = fixture.gpu.capture_end(fixture.one)?;
    let exec = fixture.gpu.graph_instantiate(graph, InstantiateOptions::default())?;
    let node = fixture.gpu.graph_topology(graph)?.nodes[0].id;
    let set = |nanos| fixture.gpu.graph_exec_set_kernel(exec, node, timed, LaunchShape::ONE, &[KernelArg::U64(nanos)]);
    let launched = fixture.gpu.now();
    fixture.gpu.graph_launch(exec, fixture.one)?;
    set(50_000_000)?;
    fixture.gpu.stream_synchronize(fixture.one)?;
    assert!((fixture.gpu.now() - launched).as_nanos() < 1_000_000, "the running launch keeps its arguments");
    fixture.gpu.graph_launch(exec, fixture.one)?;
    fixture.gpu.stream_synchronize(fixture.one)?;
    assert!((fixture.gpu.now() - launched).as_nanos() >= 50_000_000);
    Ok(())
}

#[test]
fn queued_launches_keep_their_arguments() -> Result<()> {
    for seed in 0..16 {
        let fixture = Fixture::new(SimConfig::default().with_seed(seed))?;
        let (_, exec, node) = adder(&fixture)?;
        fixture.fill(0, fixture.one)?;
        fixture.order(fixture.one, fixture.two)?;
        let mut sum = 0;
        for value in 1..=20 {
            let args = [fixture.memory.into(), KernelArg::U32(WORDS), KernelArg::U32(1 << value)];
            fixture.gpu.graph_exec_set_kernel(exec, node, fixture.add, LaunchShape::ONE, &args)?;
            fixture.gpu.graph_launch(exec, if value % 3 == 0 { fixture.one } else { fixture.two })?;
            sum += 1 << value;
        }
        fixture.gpu.device_synchronize(DEVICE)?;
        let mut word = [0; 4];
        fixture.gpu.download(DEVICE, fixture.memory, &mut word)?;
        assert_eq!(u32::from_le_bytes(word), sum, "seed {seed}");
        assert!(fixture.gpu.hazards().is_empty(), "seed {seed}: {:#?}", fixture.gpu.hazards());
    }
    Ok(())
}
