//! Elastic memory through `Runtime` on a simulated GPU.

use std::sync::Arc;

use warpool::memory::Settings;
use warpool::memory::elastic::ElasticLayout;
use warpool::memory::sleep::Keep;
use warpool_driver::sim::{SimConfig, SimDriver};
use warpool_driver::{DevicePtr, ForeignStream};
use warpool_torch::{Error, Runtime};

const LAYOUT: ElasticLayout = ElasticLayout { rows: 2, blocks: 10, block_bytes: 8 << 20 };

fn runtime(settings: &str) -> Runtime {
    let sim = Arc::new(SimDriver::new(SimConfig::default()));
    Runtime::new(sim, Settings::parse(settings).unwrap()).unwrap()
}

#[test]
fn it_is_found_by_its_address_until_it_is_released() {
    let runtime = runtime("backend:paged");
    let ptr = runtime.reserve_elastic(0, ForeignStream::NULL, LAYOUT, Some("kv")).unwrap();
    let other = runtime.reserve_elastic(0, ForeignStream::NULL, LAYOUT, None).unwrap();
    let memory = runtime.elastic(ptr).unwrap();
    let room = runtime.headroom(0).unwrap();
    memory.commit(0..4, &runtime.instance().device(0).unwrap().default_stream().unwrap()).unwrap();
    assert_eq!((memory.committed(), runtime.elastic(other).unwrap().committed()), (4, 0));
    assert_eq!(runtime.headroom(0).unwrap(), room - (64 << 20));
    assert_eq!(runtime.page_stats(0).unwrap().elastic_bytes, 64 << 20);
    drop(memory);
    runtime.release_elastic(ptr).unwrap();
    assert_eq!(runtime.page_stats(0).unwrap().elastic_bytes, 0);
    for gone in [ptr, DevicePtr(5)] {
        assert!(matches!(runtime.elastic(gone), Err(Error::NotElastic { ptr }) if ptr == gone));
        assert!(matches!(runtime.release_elastic(gone), Err(Error::NotElastic { .. })));
    }
    runtime.release_elastic(other).unwrap();
}

#[test]
fn it_sleeps_and_wakes_with_its_tag() {
    let runtime = runtime("backend:paged");
    let ptr = runtime.reserve_elastic(0, ForeignStream::NULL, LAYOUT, Some("kv")).unwrap();
    let stream = runtime.instance().device(0).unwrap().default_stream().unwrap();
    runtime.elastic(ptr).unwrap().commit(0..4, &stream).unwrap();
    assert_eq!(runtime.prepare_sleep(Some(&["kv"])).unwrap(), 64 << 20);
    assert_eq!(runtime.sleep(None, Keep::Host).unwrap().bytes_copied, 64 << 20);
    assert_eq!((runtime.tags()[0].bytes, runtime.page_stats(0).unwrap().reserved_bytes), (64 << 20, 0));
    let refused = runtime.reserve_elastic(0, ForeignStream::NULL, LAYOUT, Some("kv")).unwrap_err();
    assert!(refused.to_string().contains("wake the tag"), "{refused}");
    runtime.wake(Some(&["kv"])).unwrap();
    assert_eq!(runtime.elastic(ptr).unwrap().committed(), 4);
    runtime.release_elastic(ptr).unwrap();
}

#[test]
fn other_backends_name_the_one_that_has_it() {
    for settings in ["", "backend:expandable"] {
        let runtime = runtime(settings);
        for tag in [None, Some("kv")] {
            let error = runtime.reserve_elastic(0, ForeignStream::NULL, LAYOUT, tag).unwrap_err();
            assert!(error.to_string().contains("backend:paged"), "{error}");
        }
        assert!(runtime.headroom(0).unwrap_err().to_string().contains("backend:paged"));
    }
}
