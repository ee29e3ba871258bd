//! Which of the driver's functions `cuGetProcAddress` returns: that depends on the version of CUDA that is asked for.

use std::ffi::c_int;

/// The exported name of the function that is returned for `symbol`. `None` if it has another signature than those of
/// `calls.rs`.
pub(crate) fn exported_name(symbol: &[u8], version: c_int, is_per_thread: bool) -> Option<&[u8]> {
    /// Symbol, the version from which on it has this signature, and its exported names.
    type Entry = (&'static [u8], c_int, &'static [u8], &'static [u8]);
    const BY_VERSION: &[Entry] = &[
        (b"cuMemAlloc", 3020, b"cuMemAlloc_v2", b"cuMemAlloc_v2"),
        (b"cuMemAllocPitch", 3020, b"cuMemAllocPitch_v2", b"cuMemAllocPitch_v2"),
        (b"cuMemFree", 3020, b"cuMemFree_v2", b"cuMemFree_v2"),
        (b"cuModuleGetGlobal", 3020, b"cuModuleGetGlobal_v2", b"cuModuleGetGlobal_v2"),
        (b"cuStreamDestroy", 4000, b"cuStreamDestroy_v2", b"cuStreamDestroy_v2"),
        (b"cuDevicePrimaryCtxRelease", 11000, b"cuDevicePrimaryCtxRelease_v2", b"cuDevicePrimaryCtxRelease_v2"),
        (b"cuDevicePrimaryCtxReset", 11000, b"cuDevicePrimaryCtxReset_v2", b"cuDevicePrimaryCtxReset_v2"),
        (b"cuGraphInstantiate", 12000, b"cuGraphInstantiateWithFlags", b"cuGraphInstantiateWithFlags"),
        (b"cuGetProcAddress", 12000, b"cuGetProcAddress_v2", b"cuGetProcAddress_v2"),
        (b"cuMemAllocAsync", 0, b"cuMemAllocAsync", b"cuMemAllocAsync_ptsz"),
        (b"cuMemAllocFromPoolAsync", 0, b"cuMemAllocFromPoolAsync", b"cuMemAllocFromPoolAsync_ptsz"),
        (b"cuLaunchKernel", 0, b"cuLaunchKernel", b"cuLaunchKernel_ptsz"),
        (b"cuLaunchKernelEx", 0, b"cuLaunchKernelEx", b"cuLaunchKernelEx_ptsz"),
        (b"cuLaunchCooperativeKernel", 0, b"cuLaunchCooperativeKernel", b"cuLaunchCooperativeKernel_ptsz"),
        (b"cuGraphUpload", 0, b"cuGraphUpload", b"cuGraphUpload_ptsz"),
        (b"cuGraphLaunch", 0, b"cuGraphLaunch", b"cuGraphLaunch_ptsz"),
        (b"cuGraphInstantiateWithParams", 0, b"cuGraphInstantiateWithParams", b"cuGraphInstantiateWithParams_ptsz"),
    ];
    if let Some((_, since, legacy, per_thread)) = BY_VERSION.iter().find(|entry| entry.0 == symbol) {
        return (version >= *since).then_some(if is_per_thread { per_thread } else { legacy });
    }
    // The others have had one signature ever since. An exported name with a version is none that is asked for.
    Some(symbol).filter(|name| !name.ends_with(b"_v2") && !name.ends_with(b"_ptsz"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_and_the_default_stream_decide() {
        let name = |symbol: &'static str, version, is_per_thread| {
            exported_name(symbol.as_bytes(), version, is_per_thread).map(|name| std::str::from_utf8(name).unwrap())
        };
        assert_eq!(name("cuMemAlloc", 12_000, false), Some("cuMemAlloc_v2"));
        assert_eq!(name("cuMemAlloc", 2000, false), None, "it had 32 bits");
        assert_eq!(name("cuLaunchKernel", 4000, true), Some("cuLaunchKernel_ptsz"));
        assert_eq!(name("cuGraphInstantiate", 11_000, false), None, "it had five arguments");
        assert_eq!(name("cuGraphInstantiate", 12_000, true), Some("cuGraphInstantiateWithFlags"));
        assert_eq!(name("cuMemCreate", 10_020, false), Some("cuMemCreate"));
        assert_eq!(name("cuMemAlloc_v2", 12_000, false), None);
    }
}
