//! Kernels of executables that are given other arguments, beyond what every driver promises: what the simulated device
//! refuses and how long the kernel takes then.

mod common;

use common::{DEVICE, KERNELS, Lab, WORDS};
use warpool_driver::sim::{HazardKind, SimConfig};
use warpool_driver::*;

/// What runs as long as its argument says.
static PATIENT: KernelSource = KernelSource {
    name: "patient",
    cuda: "",
    mirrors: &[KernelMirror {
        name: "patient",
        run: |_| Ok(()),
        nanos: Some(|_, args| if let Some(&KernelArg::U64(nanos)) = args.first() { nanos } else { 0 }),
    }],
};

/// A graph of one kernel that adds 1, its executable and its node.
fn adder(lab: &Lab) -> Result<(GraphId, GraphExecId, NodeId)> {
    lab.gpu.capture_begin(lab.one, CaptureMode::Relaxed)?;
    lab.add(lab.memory, WORDS, 1, lab.one)?;
    let graph = lab.gpu.capture_end(lab.one)?;
    let exec = lab.gpu.graph_instantiate(graph, InstantiateOptions::default())?;
    Ok((graph, exec, lab.gpu.graph_topology(graph)?.nodes[0].id))
}

fn refused(what: &str, result: Result<()>, code: ErrorCode, part: &str) {
    let error = result.expect_err(what);
    assert_eq!(error.code, code, "{what}: {error}");
    assert!(error.to_string().contains(part), "{what}: {error} says nothing of {part:?}");
}

#[test]
fn a_kernel_stays_the_function_that_it_was() -> Result<()> {
    let lab = Lab::new(SimConfig::default())?;
    let (graph, exec, node) = adder(&lab)?;
    let args = [lab.memory.into(), KernelArg::U32(WORDS), KernelArg::U32(2)];
    let set = |node, function| lab.gpu.graph_exec_set_kernel(exec, node, function, LaunchShape::ONE, &args);
    let module = lab.gpu.module_load(DEVICE, &KERNELS)?;
    let (twin, sum) = (lab.gpu.function_get(module, "add")?, lab.gpu.function_get(module, "sum")?);
    refused("another function", set(node, sum), ErrorCode::InvalidValue, "was captured as add");
    refused("its twin in another module", set(node, twin), ErrorCode::InvalidValue, "was captured as add");
    refused("another node", set(NodeId(77), lab.add), ErrorCode::InvalidValue, "node 77");
    lab.gpu.module_unload(module)?;
    refused("an unloaded one", set(node, twin), ErrorCode::InvalidHandle, "destroyed");
    set(node, lab.add)?;
    lab.gpu.graph_destroy(graph)?;
    refused("a template that is gone", set(node, lab.add), ErrorCode::InvalidValue, &graph.to_string());
    assert_eq!(lab.gpu.hazards().iter().map(|hazard| hazard.kind).collect::<Vec<_>>(), [HazardKind::UseAfterDestroy]);
    Ok(())
}

#[test]
fn a_librarys_kernel_is_nobodys_function() -> Result<()> {
    let lab = Lab::new(SimConfig::default())?;
    lab.fill(0, lab.one)?;
    let handle = lab.gpu.library_create(Library::Blas, DEVICE)?;
    lab.gpu.library_set_stream(handle, lab.one)?;
    let matrix = BlasMatrix { ptr: lab.memory, stride: 1, transposed: false };
    let c = BlasMatrix { ptr: lab.memory.offset(64), ..matrix };
    lab.gpu.capture_begin(lab.one, CaptureMode::Relaxed)?;
    lab.gpu.blas_sgemm(handle, &Sgemm { m: 1, n: 1, k: 1, alpha: 1.0, a: matrix, b: matrix, beta: 0.0, c })?;
    let graph = lab.gpu.capture_end(lab.one)?;
    let exec = lab.gpu.graph_instantiate(graph, InstantiateOptions::default())?;
    let node = lab.gpu.graph_topology(graph)?.nodes[0];
    assert_eq!(node.kind, NodeKind::Kernel);
    let shape = LaunchShape { grid: [1; 3], block: [16, 16, 1], shared_bytes: 0 };
    let set = lab.gpu.graph_exec_set_kernel(exec, node.id, lab.add, shape, &[]);
    refused("a product", set, ErrorCode::InvalidValue, "was captured as sgemm");
    Ok(())
}

#[test]
fn new_arguments_say_how_long_the_kernel_runs() -> Result<()> {
    let lab = Lab::new(SimConfig::default())?;
    let module = lab.gpu.module_load(DEVICE, &PATIENT)?;
    let patient = lab.gpu.function_get(module, "patient")?;
    lab.gpu.capture_begin(lab.one, CaptureMode::Relaxed)?;
    lab.gpu.kernel_launch(patient, LaunchShape::ONE, &[KernelArg::U64(1_000)], lab.one)?;
    let graph = lab.gpu.capture_end(lab.one)?;
    let exec = lab.gpu.graph_instantiate(graph, InstantiateOptions::default())?;
    let node = lab.gpu.graph_topology(graph)?.nodes[0].id;
    let set = |nanos| lab.gpu.graph_exec_set_kernel(exec, node, patient, LaunchShape::ONE, &[KernelArg::U64(nanos)]);
    let launched = lab.gpu.now();
    lab.gpu.graph_launch(exec, lab.one)?;
    set(50_000_000)?;
    lab.gpu.stream_synchronize(lab.one)?;
    assert!((lab.gpu.now() - launched).as_nanos() < 1_000_000, "the launch under way kept its own");
    lab.gpu.graph_launch(exec, lab.one)?;
    lab.gpu.stream_synchronize(lab.one)?;
    assert!((lab.gpu.now() - launched).as_nanos() >= 50_000_000);
    Ok(())
}

#[test]
fn launches_in_flight_each_add_what_they_were_launched_with() -> Result<()> {
    for seed in 0..16 {
        let lab = Lab::new(SimConfig::default().with_seed(seed))?;
        let (_, exec, node) = adder(&lab)?;
        lab.fill(0, lab.one)?;
        lab.order(lab.one, lab.two)?;
        let mut sum = 0;
        for value in 1..=20 {
            let args = [lab.memory.into(), KernelArg::U32(WORDS), KernelArg::U32(1 << value)];
            lab.gpu.graph_exec_set_kernel(exec, node, lab.add, LaunchShape::ONE, &args)?;
            lab.gpu.graph_launch(exec, if value % 3 == 0 { lab.one } else { lab.two })?;
            sum += 1 << value;
        }
        lab.gpu.device_synchronize(DEVICE)?;
        let mut word = [0; 4];
        lab.gpu.download(DEVICE, lab.memory, &mut word)?;
        assert_eq!(u32::from_le_bytes(word), sum, "seed {seed}");
        assert!(lab.gpu.hazards().is_empty(), "seed {seed}: {:#?}", lab.gpu.hazards());
    }
    Ok(())
}
